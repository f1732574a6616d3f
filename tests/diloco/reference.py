"""DiLoCo by definition: all replicas in one process, one after the other, with torch's own SGD."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from shardwise.diloco import OuterSGD, Overlapped, Streaming
from shardwise.optim import Muon, muon_groups
from tests.sharding.nets import Net, batches, loss_of, seeded

ROWS = 4  # of a replica's batch, however many ranks share it


def make_inner(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the inner optimizer of most tests."""
    # A large epsilon: otherwise the sign of a rounding error becomes a full step.
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, fused=True)


def adamw_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW for all parameters of a model."""
    return make_inner(model.parameters())


def muon_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the blocks, and AdamW for the rest."""
    return Muon(muon_groups(model, muon={"lr": 0.02}, adamw={"lr": 0.02, "eps": 1e-3}))


def batch_of(replica: int, step: int) -> torch.Tensor:
    """Return what a replica trains on in a step (the first is 1), ``(ROWS, WIDTH)``."""
    return batches(3, step, ROWS)[replica]


class Reference:
    """Replicas that take turns.

    Args:
        count: how many.
        outer: the outer optimizer.
        fragments: beginnings of the parameters' names, a fragment each.
        alpha: of the inner parameters that remains.
        inner_of: makes the inner optimizer of a model.
        overlapped: what becomes of steps during an exchange.
    """

    def __init__(
        self,
        count: int,
        outer: OuterSGD,
        fragments: Sequence[tuple[str, ...]] = (("",),),
        alpha: float = 0.0,
        inner_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw_of,
        overlapped: Overlapped = Overlapped.MIXED,
    ) -> None:
        self.alpha = alpha
        self.keeps = overlapped is Overlapped.KEPT
        self._inner_of = inner_of
        self.settings = outer
        self.outer = seeded(Net)
        self.replicas: dict[int, nn.Module] = {}
        self.inner: dict[int, torch.optim.Optimizer] = {}
        for replica in range(count):
            self.join(replica)
        self.fragments = [
            [name for name, _ in self.outer.named_parameters() if name.startswith(beginnings)]
            for beginnings in fragments
        ]
        parameters = dict(self.outer.named_parameters())
        assert sorted(itertools.chain(*self.fragments)) == sorted(parameters), (
            "each in one fragment"
        )
        self.sgd = [
            torch.optim.SGD(
                [parameters[name] for name in names],
                lr=outer.lr,
                momentum=outer.momentum,
                nesterov=outer.nesterov,
            )
            for names in self.fragments
        ]
        self.rounds = [0] * len(self.fragments)
        self.under_way: dict[int, Mapping[str, torch.Tensor]] = {}
        #: Inner parameters of all replicas when an exchange began.
        self.begun: dict[int, list[dict[str, torch.Tensor]]] = {}

    def join(self, replica: int) -> None:
        """Add a replica, at the outer parameters and with a new optimizer."""
        model = seeded(Net)
        model.load_state_dict(self.outer.state_dict())
        self.replicas[replica] = model
        self.inner[replica] = self._inner_of(model)

    def leave(self, replica: int) -> None:
        """Remove a replica."""
        del self.replicas[replica], self.inner[replica]

    def inner_step(self, step: int) -> None:
        """Take one inner step on every replica."""
        for replica, model in self.replicas.items():
            loss_of(model, batch_of(replica, step)).backward()
            self.inner[replica].step()
            self.inner[replica].zero_grad()

    @torch.no_grad()
    def begin(self, fragment: int = 0) -> None:
        """Return the average of the pseudo-gradients as they are now."""
        outer = dict(self.outer.named_parameters())
        found = [dict(model.named_parameters()) for model in self.replicas.values()]
        self.under_way[fragment] = {
            name: sum(outer[name] - inner[name] for inner in found) / len(found)
            for name in self.fragments[fragment]
        }
        self.begun[fragment] = [
            {name: inner[name].detach().clone() for name in self.fragments[fragment]}
            for inner in found
        ]

    @torch.no_grad()
    def apply(self, fragment: int = 0) -> None:
        """Take the outer step, and mix it into every replica, or move every replica by it."""
        outer = dict(self.outer.named_parameters())
        for name, mean in self.under_way.pop(fragment).items():
            outer[name].grad = mean
        [group] = self.sgd[fragment].param_groups
        self.rounds[fragment] += 1
        if self.rounds[fragment] <= self.settings.warmup:
            risen = self.rounds[fragment] / self.settings.warmup
            group["momentum"] = self.settings.momentum * risen
        self.sgd[fragment].step()
        for model, begun in zip(self.replicas.values(), self.begun.pop(fragment), strict=True):
            inner = dict(model.named_parameters())
            for name in self.fragments[fragment]:
                if self.keeps:
                    inner[name].add_(outer[name] - begun[name])
                else:
                    inner[name].mul_(self.alpha).add_(outer[name], alpha=1 - self.alpha)

    def exchange(self, fragment: int = 0) -> None:
        """Do both at once."""
        self.begin(fragment)
        self.apply(fragment)


#: The fragments of ``Net`` when there are two: blocks in turn, the rest to the smaller one.
TWO_FRAGMENTS = (("blocks.0.", "blocks.2."), ("blocks.1.", "head.", "gain"))
STREAMING = Streaming(fragments=2, overlap=2, alpha=0.25)
KEEPING = Streaming(fragments=2, overlap=2, overlapped=Overlapped.KEPT)


def plain(
    steps: int,
    every: int,
    outer: OuterSGD,
    count: int = 2,
    inner_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw_of,
) -> Reference:
    """Train with DiLoCo."""
    reference = Reference(count, outer, inner_of=inner_of)
    for step in range(1, steps + 1):
        reference.inner_step(step)
        if step % every == 0:
            reference.exchange()
    return reference


def late(steps: int, every: int) -> Reference:
    """Train with updates that are applied a round late."""
    reference = Reference(2, OuterSGD(), overlapped=Overlapped.KEPT)
    for step in range(1, steps + 1):
        reference.inner_step(step)
        if step % every == 0:
            if reference.under_way:
                reference.apply()
            reference.begin()
    return reference


def streamed(steps: int, streaming: Streaming = STREAMING) -> Reference:
    """Train with Streaming DiLoCo, with the start and end of each exchange written out."""
    reference = Reference(
        2, OuterSGD(), TWO_FRAGMENTS, streaming.alpha, overlapped=streaming.overlapped
    )
    begins = {2: 1, 4: 0, 6: 1, 8: 0, 10: 1}
    for step in range(1, steps + 1):
        reference.inner_step(step)
        if step - STREAMING.overlap in begins:
            reference.apply(begins[step - STREAMING.overlap])
        if step in begins:
            reference.begin(begins[step])
    return reference
