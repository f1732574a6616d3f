"""One optimizer step: the loop of trainings takes it, plans rehearse it, and proofs compare it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.base.observe import Activity
from shardwise.insight.schema.sharding import Gathers, Stepping
from shardwise.optim.norms import clip_grad_norm_


class Updater(Protocol):
    """What updates parameters: an optimizer, or what stands for one."""

    def step(self) -> Any:
        """Update the parameters."""

    def zero_grad(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One optimizer step. The parts are called in this order, by every rank.

    Attributes:
        model: sharded by our ``fully_shard`` or by torch's, or not at all.
        loss: computes the loss of the model on a batch, a scalar.
        optimizer: updates the parameters; ``None``: nothing does.
        gathers: how often parameters that stay in memory after forward are gathered.
        stepping: whether the optimizer steps in backward: then it is that of ``in_backward``.
        max_norm: the largest norm of the gradients; ``math.inf``: it is computed, and nothing is
            clipped; ``None``: it is not computed.
        after: called after each step: makes equal on all ranks what is not sharded.
        around: entered around each ``FORWARD`` and ``BACKWARD`` of a microbatch.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Updater | None
    gathers: Gathers = Gathers.EVERY_MICROBATCH
    stepping: Stepping = Stepping.AFTER_BACKWARD
    max_norm: float | None = None
    after: Callable[[], None] = lambda: None
    around: Callable[[Activity], AbstractContextManager[object]] = lambda _: nullcontext()

    def backward(
        self, batches: Iterable[Any], count: int, divisor: float
    ) -> Iterator[torch.Tensor]:
        """Run forward and backward over microbatches; gradients are reduced in the last backward.

        One microbatch for each loss that is asked for; ask for all of them.

        Args:
            batches: the microbatches, each made when it is needed.
            count: how many there are.
            divisor: what each loss is divided by.

        Yields:
            The losses, as computed: scalars without a graph.
        """
        sharded: Any = self.model
        is_sharded = hasattr(sharded, "set_requires_gradient_sync")
        for number, batch in enumerate(batches):
            last = number == count - 1
            if self.gathers is Gathers.EVERY_MICROBATCH and is_sharded:
                sharded.set_requires_gradient_sync(last)
            with self.around(Activity.FORWARD):
                loss = self.loss(self.model, batch)
            if self.gathers is Gathers.EVERY_STEP:
                # After forward, which takes what the backward before has left in memory.
                sharded.set_requires_gradient_sync(last)
                sharded.set_reshard_after_backward(last)
                sharded.set_is_last_backward(last)
            with self.around(Activity.BACKWARD):
                (loss / divisor).backward()  # type: ignore[no-untyped-call]
            loss = loss.detach()
            yield loss
            del loss  # its memory is free for the next microbatch

    def norm(self) -> torch.Tensor | None:
        """Clip the gradients, unless backward did; return their norm before, if it is computed."""
        if self.max_norm is None:
            return None
        if self.stepping is Stepping.IN_BACKWARD:
            in_backward: Any = self.optimizer
            norm: torch.Tensor = in_backward.grad_norm
            return norm
        return clip_grad_norm_(list(self.model.parameters()), self.max_norm)

    def update(self) -> None:
        """Update the parameters, and drop the gradients."""
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.after()
