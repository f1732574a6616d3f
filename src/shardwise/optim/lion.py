"""``Lion``: the sign of an average of gradients, on this rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shardwise._torch import autograd, dtensor
from shardwise.base.arguments import check_arguments
from shardwise.optim.checked import (
    AT_ONCE,
    CheckedOptimizer,
    gradient,
    shard_of_state,
    with_gradients,
)

_AVERAGE = "exp_avg"

#: This rank's part of a parameter, of its gradient and of its average.
_Part = tuple[Tensor, Tensor, Tensor]


class Lion(CheckedOptimizer):
    """Lion, of Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).

    The update is the sign of an average of gradients, so every element moves by ``lr``. It needs a
    smaller ``lr`` than AdamW, by a factor of 3 to 10, and a ``weight_decay`` that is larger by the
    same factor.

    The state is one average for each parameter, ``exp_avg``, of its dtype and placements. Each rank
    updates its shards, and sends nothing. Parameters of bf16 and fp16 are rounded once in a step.

    Args:
        params: parameters, or groups of them, named or not; sharded or not.
        lr: learning rate.
        betas: the shares of the average in the update, and in the average of the next step.
        weight_decay: share of a parameter that is taken off, times ``lr``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_arguments(Lion.__init__, locals())
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _rules(self, options: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
        yield "betas", all(0 <= beta <= 1 for beta in options["betas"]), "two from 0 to 1"

    def _step(self) -> None:
        todo = [(group, self._parts(named)) for group, named in with_gradients(self)]
        for group, parts in todo:
            for batch in _batches(parts):
                _update(batch, group)

    def _parts(self, named: Sequence[tuple[str, Tensor]]) -> list[_Part]:
        found = []
        for name, param in named:
            grad, shard = gradient(name, param), dtensor.plain(param)
            average = shard_of_state(name, param, _AVERAGE, self.state[param])
            found.append((shard, dtensor.plain(grad).to(shard.dtype), average))
        return found


def _batches(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Divide large parts, and put small ones of the same device and dtype together."""
    open_batches: dict[tuple[torch.device, torch.dtype], list[_Part]] = {}
    for part in parts:
        for param, grad, average in _pieces_of(part):
            kind = param.device, param.dtype
            batch = open_batches.setdefault(kind, [])
            batch.append((param, grad, average))
            if sum(each.numel() for each, _, _ in batch) >= AT_ONCE:
                yield open_batches.pop(kind)
    yield from open_batches.values()


def _pieces_of(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same piece of tensors of one shape, again and again, until all were yielded."""
    first = tensors[0]
    if first.ndim == 0 or first.numel() <= AT_ONCE:
        yield tuple(tensors)
        return
    rows = max(1, AT_ONCE * len(first) // first.numel())
    yield from zip(*(torch.split(each, rows) for each in tensors), strict=True)


def _update(batch: Sequence[_Part], group: Mapping[str, Any]) -> None:
    params, grads, averages = (list(each) for each in zip(*batch, strict=True))
    (beta1, beta2), decay = group["betas"], group["weight_decay"]
    updates = autograd.foreach_lerp(averages, grads, 1 - beta1)
    autograd.foreach_sign_(updates)
    if decay:
        autograd.foreach_add_(updates, params, decay)
    autograd.foreach_add_(params, updates, -float(group["lr"]))
    autograd.foreach_lerp_(averages, grads, 1 - beta2)
