"""What each optimizer is on one process: torch's own, or the algorithm of its paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise.optim import Adafactor, Lion
from tests.corpus.gathering import optimizer_state
from tests.optim.nets import Net, make_muon, part_of, set_gradients

Has = Callable[[str], bool]
#: The matrices that Muon orthogonalizes, beside the stack of them.
HIDDEN = ("up.weight", "down.weight", "square.weight")


def every(name: str) -> bool:
    """Say that each parameter has a gradient."""
    return True


class Reference(Protocol):
    """An optimizer of whole tensors, with a net of its own."""

    #: How far values of fp32 may be apart.
    tolerance: float

    def step(self, number: int, has: Has = every) -> None:
        """Take a step with the gradients of :func:`tests.optim.nets.set_gradients`."""

    def values(self) -> dict[str, torch.Tensor]:
        """Return the whole parameters, by name."""

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return the whole state of a parameter, as far as ours is to have the same."""


class AdafactorReference:
    """Torch's Adafactor on full tensors of fp32, rounded to a dtype after each step."""

    SETTINGS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.05}  # noqa: RUF012
    tolerance = 1e-6

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.net = Net().to(dtype).float()
        self._dtype = dtype
        self._optimizer = torch.optim.Adafactor(self.net.parameters(), **self.SETTINGS | settings)

    def step(self, number: int, has: Has = every) -> None:
        set_gradients(self.net, number, has)
        for param in self.net.parameters():
            param.grad = None if param.grad is None else param.grad.to(self._dtype).float()
        self._optimizer.step()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for param in self.net.parameters():
                param.copy_(param.to(self._dtype))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.net.named_parameters()}

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return self._optimizer.state[self.net.get_parameter(name)]


class LionReference:
    """Algorithm 2 of the paper, on full tensors."""

    LR, BETAS, DECAY = 0.03, (0.8, 0.95), 0.2
    tolerance = 1e-6

    def __init__(self) -> None:
        self.net = Net()
        self._averages = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}

    @torch.no_grad()
    def step(self, number: int, has: Has = every) -> None:
        set_gradients(self.net, number, has)
        for name, param in self.net.named_parameters():
            if param.grad is None:
                continue
            average = self._averages[name]
            update = (self.BETAS[0] * average + (1 - self.BETAS[0]) * param.grad).sign()
            param.copy_(param - self.LR * (update + self.DECAY * param))
            self._averages[name] = self.BETAS[1] * average + (1 - self.BETAS[1]) * param.grad

    def values(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.net.named_parameters()}

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return {"exp_avg": self._averages[name]}


class MuonReference:
    """Torch's own optimizers on full tensors: each matrix of a stack is a parameter."""

    tolerance = 3e-7

    def __init__(self, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
        self.net = Net().to(dtype)
        self.experts = [nn.Parameter(each.clone()) for each in self.net.experts.detach()]
        hidden = [param for name, param in self.net.named_parameters() if name in HIDDEN]
        rest = {n: p for n, p in self.net.named_parameters() if n not in (*HIDDEN, "experts")}
        decayed = [param for param in rest.values() if param.ndim > 1]
        vectors = [param for param in rest.values() if param.ndim == 1]
        self.muon = torch.optim.Muon([*hidden, *self.experts], lr=0.1, **settings)
        decay = settings.get("weight_decay", 0.1)
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=0.02,
            betas=(0.9, 0.95),
        )

    def step(self, number: int, has: Has = every) -> None:
        set_gradients(self.net, number, has)
        grad = self.net.experts.grad
        for i, expert in enumerate(self.experts):
            expert.grad = None if grad is None else grad[i]
        self.muon.step()
        self.adamw.step()

    def values(self) -> dict[str, torch.Tensor]:
        found = {name: param.detach() for name, param in self.net.named_parameters()}
        return {**found, "experts": torch.stack([each.detach() for each in self.experts])}

    def state(self, name: str) -> dict[str, torch.Tensor]:
        return {}


def make_adafactor(net: nn.Module, **settings: Any) -> Adafactor:
    """Make our Adafactor with the settings of its reference."""
    return Adafactor(net.named_parameters(), **AdafactorReference.SETTINGS | settings)


def make_lion(net: nn.Module) -> Lion:
    """Make our Lion with the settings of its reference."""
    its = LionReference
    return Lion(net.named_parameters(), lr=its.LR, betas=its.BETAS, weight_decay=its.DECAY)


#: By name: what makes the optimizer of a sharded net, and the same of a whole one.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[..., Reference]]] = {
    "muon": (make_muon, MuonReference),
    "adafactor": (make_adafactor, AdafactorReference),
    "lion": (make_lion, LionReference),
}


def assert_same(
    net: nn.Module, reference: Reference, what: str, tolerance: float | None = None
) -> None:
    """Compare each part of a sharded net with that of the whole one."""
    values = reference.values()
    # The end of a tensor is computed without vectors, and every rank's shard has another end.
    rtol = reference.tolerance if tolerance is None else tolerance
    for name, param in net.named_parameters():
        wanted = part_of(values[name].to(param.dtype), param)
        found, expected = dtensor.plain(param.detach()), dtensor.plain(wanted)
        torch.testing.assert_close(
            found, expected, rtol=rtol, atol=reference.tolerance, msg=f"{what}: {name}"
        )


def assert_same_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference
) -> None:
    """Compare the state of a sharded net, which lies as its parameters, with the whole one's."""
    found = optimizer_state(net, optimizer)
    for name, param in net.named_parameters():
        for key, wanted in reference.state(name).items():
            if key == "exp_avg" and isinstance(param, DTensor):
                assert optimizer.state[param][key].placements == param.placements
            torch.testing.assert_close(found[name][key], wanted, rtol=1e-5, atol=1e-7)
