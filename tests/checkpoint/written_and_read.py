"""Trainings to be saved in one way and loaded in another, and all that is in them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import FullyShardedDataParallel, XlaFullyShardedDataParallel, fully_shard, optim
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.checkpoint.ranks.state import own_tensors
from tests import packing
from tests.corpus.gathering import join, part_of

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Uneven rows, a scalar, a frozen parameter, one without a gradient, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 5)
        self.down = nn.Linear(5, 3, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((4, 2), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("seen", torch.tensor(0))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        found: Tensor = self.down(self.up(x).tanh()) * self.scale + self.frozen.sum()
        return found


class Odd(torch.optim.Optimizer):
    """States of all kinds: integers, bools, scalars, fp32 beside bf16, nested, and no tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rate": (1, 2.5), "name": "odd", "none": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "count": torch.tensor(2**40 + 1),
                        "ticks": torch.zeros_like(p, dtype=torch.int16),
                        "wide": torch.zeros_like(p, dtype=torch.float64),
                        "total": torch.zeros_like(p, dtype=torch.float32),
                        "sign": p.grad > 0,
                        "inner": {"sum": torch.zeros_like(p, dtype=torch.float32), "note": "in"},
                        "flag": torch.tensor(True),
                        "rate": 1,
                    }
                state["count"] += 1
                state["ticks"] += 1
                state["wide"] += 1e-9
                state["rate"] *= 2
                state["total"].add_(p.grad.float(), alpha=1 / 3)
                state["inner"]["sum"].add_(p.grad.float(), alpha=1 / 7)
                state["sign"] = p.grad > 0
                state["flag"] = ~state["flag"]
                change = state["total"] + state["inner"]["sum"] * state["sign"] * state["ticks"]
                p.sub_(change.to(p.dtype), alpha=group["lr"])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups with other settings, two of them empty, in another order than the model's."""
    named = dict(model.named_parameters())
    matrices = [each for each in named.values() if each.ndim > 1 and each.requires_grad]
    others = [each for each in named.values() if each.ndim <= 1]
    return [
        {"params": [], "lr": 0.7},
        {"params": others[::-1], "lr": 0.25, "weight_decay": 0.0},
        {"params": [], "lr": 0.9, "weight_decay": 0.5},
        {"params": matrices, "lr": 0.125},
        {"params": [p for p in named.values() if not p.requires_grad], "lr": 0.3},
    ]


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return optim.Muon(optim.muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 0.01}))


#: Each optimizer, and the steps that it takes before it is saved.
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "SGD": (lambda m: torch.optim.SGD(m.parameters(), lr=0.5), 2),
    "SGD before its first step": (lambda m: torch.optim.SGD(m.parameters(), 0.5, momentum=0.5), 0),
    "SGD with momentum": (lambda m: torch.optim.SGD(m.parameters(), 0.5, momentum=0.5), 2),
    "AdamW before its first step": (lambda m: torch.optim.AdamW(m.parameters()), 0),
    "AdamW, fused": (lambda m: torch.optim.AdamW(m.parameters(), fused=True, amsgrad=True), 2),
    "tensors as settings": (
        lambda m: torch.optim.AdamW(
            m.parameters(),
            lr=torch.tensor(0.01),
            betas=(torch.tensor(0.5), torch.tensor(0.75)),
            foreach=False,
        ),
        2,
    ),
    "groups": (lambda m: torch.optim.AdamW(_groups(m)), 2),
    "groups without state": (lambda m: torch.optim.SGD(_groups(m)), 1),
    "named": (lambda m: torch.optim.AdamW(list(m.named_parameters())[::-1]), 2),
    "states of all kinds": (lambda m: Odd(m.parameters()), 2),
    "local": (lambda m: optim.local(torch.optim.AdamW, m.parameters()), 2),
    "local without state": (lambda m: optim.local(torch.optim.SGD, m.parameters(), lr=0.5), 1),
    "whole": (lambda m: optim.whole(torch.optim.AdamW, m.parameters()), 2),
    "whole, groups": (lambda m: optim.whole(torch.optim.AdamW, _groups(m)), 2),
    "whole without state": (lambda m: optim.whole(torch.optim.SGD, m.parameters(), lr=0.5), 1),
    "Muon": (_muon, 2),
    "Muon before its first step": (_muon, 0),
    "AdamW8bit": (lambda m: optim.AdamW8bit(_trained(m)), 2),
    "Adafactor": (lambda m: optim.Adafactor(_trained(m)), 2),
    "Lion": (lambda m: optim.Lion(_groups(m)), 2),
    "in backward": (
        lambda m: (
            optim.in_backward(m, lambda ps: torch.optim.AdamW(ps))
            if isinstance(m, torch.distributed.fsdp.FSDPModule)
            else torch.optim.AdamW(m.parameters())
        ),
        2,
    ),
    "offloaded": (lambda m: optim.offload(torch.optim.AdamW(m.parameters()), "host"), 2),
}

LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {}


def _layout(name: str, ranks: int) -> Callable[[Any], Any]:
    def add(fn: Any) -> Any:
        LAYOUTS[name] = ranks, fn
        return fn

    return add


@_layout("unsharded", 1)
def _unsharded(model: nn.Module) -> nn.Module:
    return model


@_layout("full", 2)
def _full(model: nn.Module) -> nn.Module:
    fully_shard(model.up)
    return fully_shard(model)


@_layout("grad-op", 2)
def _grad_op(model: nn.Module) -> nn.Module:
    fully_shard(model.down, reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


@_layout("hybrid", 4)
def _hybrid(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


@_layout("wide", 4)
def _wide(model: nn.Module) -> nn.Module:
    return fully_shard(model)


@_layout("FSDP1", 2)
def _fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@_layout("XLA", 2)
def _xla(model: nn.Module) -> nn.Module:
    return XlaFullyShardedDataParallel(model)


def build(
    layout: str, make: Make, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = LAYOUTS[layout][1](Net(dtype))
    return model, make(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step, with the same numbers on every rank: their mean is what each has."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All values of all ranks by name, and the settings of groups."""
    own = own_tensors(model)
    tree: dict[str, Any] = {"model": own}
    if optimizer is not None:
        tree |= copy.copy(optimizer_tree(optimizer, parameter_names(model, own)))
        tree.setdefault("state", {})
    flat = dict(_flat(tree, ""))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: join([each]) for name, each in flat.items()}
    packed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(packed, packing.dumps(flat))
    ranks = [pickle.loads(each) for each in packed]
    names = {name: None for each in ranks for name in each}
    return {name: join([each[name] for each in ranks if name in each]) for name in names}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}/{key}")
    elif isinstance(value, list | tuple) and value:
        yield name, type(value).__name__
        for i, each in enumerate(value):
            yield from _flat(each, f"{name}/{i}")
    else:
        yield name, part_of(value) if isinstance(value, Tensor) else value


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 0.0
) -> list[str]:
    """What is other than expected, to the last bit and the type, or by more than ``rtol``."""
    names = {**expected, **found}
    return [
        f"{name}: found {found.get(name, 'nothing')!r}, expected {expected.get(name, 'nothing')!r}"
        for name in names
        if not _same(found.get(name, _NOTHING), expected.get(name, _NOTHING), rtol)
    ]


_NOTHING = object()


def _same(one: Any, other: Any, rtol: float) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if rtol and one.is_floating_point() and other.is_floating_point():
            return torch.allclose(one, other, rtol=rtol, atol=rtol)
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
