"""What a root knows of gradients that are not complete: under way, kept, or left to the user.

Usually the end of a backward completes all deliveries. A schedule with several backwards in a step
(a pipeline's) may set ``set_manual_backward_finalization(True)`` instead, and say when. Until then
groups keep what they could not reduce, and deliveries that have started go on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch.distributed as dist

from shardwise._torch import autograd, fsdp
from shardwise.base import observe
from shardwise.base.observe import Activity
from shardwise.sharding.delivery import Delivery, When
from shardwise.sharding.group import ParamGroup


class StepProgress(enum.Enum):
    """How far the gradients of a step are.

    ``ADDING``: backwards add to them. ``FINALIZED``: all deliveries have started. ``COMPLETE``:
    they are. ``DROPPED``: they are lost.
    """

    ADDING = "adding"
    FINALIZED = "finalized"
    COMPLETE = "complete"
    DROPPED = "dropped"


class GradientReductionHandle(fsdp.TorchGradientReductionHandle):
    """The gradients of a step; see :meth:`FSDPModule.finalize_backward`.

    Args:
        complete: completes them; ``None`` if there are none.

    Attributes:
        progress: how far they are.
    """

    def __init__(self, complete: Callable[[], None] | None) -> None:
        self.progress = StepProgress.COMPLETE if complete is None else StepProgress.ADDING
        self._complete = complete

    def wait(self) -> None:
        """Wait until the sharded gradients are complete. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state()``, or an exception, has dropped the gradients.
            PeerLostError: a peer died or stalled.
        """
        if self.progress is StepProgress.DROPPED:
            raise RuntimeError(
                f"GradientReductionHandle.wait() on rank {dist.get_rank()}: the gradients were "
                "dropped by reset_iter_state(), or after an exception. Run the step again"
            )
        if self._complete is not None and self.progress is not StepProgress.COMPLETE:
            self._complete()


class Ledger:
    """The gradients under a root that are not complete.

    Args:
        groups: the groups under the root.
        complete: completes all gradients, and ends the step.

    Attributes:
        is_last_backward: whether the end of a backward completes them, unless the user does.
        is_manual: whether the user does.
    """

    def __init__(self, groups: Sequence[ParamGroup], complete: Callable[[], None]) -> None:
        self.is_last_backward = True
        self.is_manual = False
        self._groups = groups
        self._complete = complete
        # In the order in which they started.
        self._in_flight: list[Delivery] = []
        # The step whose backwards have begun.
        self._step: GradientReductionHandle | None = None

    @property
    def ends_step(self) -> bool:
        """Whether the end of a backward completes all gradients."""
        return self.is_last_backward and not self.is_manual

    # -- deliveries ------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Delivery]:
        """What backward has to move on."""
        return [each for each in self._in_flight if each.when is not When.LEFT]

    @property
    def left_alone(self) -> list[Delivery]:
        """What continues without it: an all-reduce over replicas, which holds shards only."""
        return [each for each in self._in_flight if each.when is When.LEFT]

    def start(self, group: ParamGroup) -> None:
        """Start to deliver the gradients of ``group``, after advancing earlier deliveries.

        This bounds the memory in flight: the full gradients of one group (or of as many as its
        ``reduce_scatter_max_input_buffers``) beside those that backward is computing.
        """
        if self._in_flight:
            pending = self.pending
            due = len(pending) + 1 - group.options.reduce_scatter_max_input_buffers
            for delivery in pending[: max(0, due)]:
                self._move_on(delivery)
        with observe.during(Activity.REDUCE, group.label.name):
            started = group.reduce_grads(self.ends_step)
        if started is not None and not started.has_landed:
            self._in_flight.append(started)
            if started.when is When.AT_ONCE or (started.when is When.BEFORE_STEP and started.steps):
                # An optimizer in backward steps before the next group's backward, with the
                # complete gradient. That includes what earlier backwards are still reducing.
                self.settle()

    def hold(self) -> None:
        """Put what waits for a later all-reduce where that delivery will look for it."""
        for delivery in self._in_flight:
            if delivery.when is When.HELD:
                delivery.finish()
        self._forget_landed()

    def settle(self) -> None:
        """Wait until all deliveries are over."""
        for delivery in self.pending:
            self._move_on(delivery)
        while self._in_flight:
            self._in_flight.pop(0).finish()

    def _move_on(self, delivery: Delivery) -> None:
        """Wait for what ``delivery`` waits for, and start what follows."""
        delivery.advance()
        if delivery.when is When.LEFT:
            # At most one gradient per group, however many backwards add theirs. What steps in
            # backward does so to have few of them.
            left = self.left_alone
            if len(left) > (1 if delivery.steps else len(self._groups)):
                left[0].finish()
        self._forget_landed()

    def _forget_landed(self) -> None:
        self._in_flight = [each for each in self._in_flight if not each.has_landed]

    # -- steps -----------------------------------------------------------------------------------

    def begin_step(self) -> GradientReductionHandle:
        """Return the step that is under way, or begins now: a backward adds to its gradients."""
        if self._step is None:
            self._step = GradientReductionHandle(self._complete)
        return self._step

    @property
    def is_finalized(self) -> bool:
        """Whether the user has to wait for gradients before the next forward."""
        return self._step is not None and self._step.progress is StepProgress.FINALIZED

    def set_manual(self, is_manual: bool) -> None:
        """Let the user complete backwards, or the end of each.

        Raises:
            RuntimeError: a backward has begun, and is not completed.
        """
        if is_manual != self.is_manual and (self._step is not None or autograd.in_backward()):
            raise RuntimeError(
                f"set_manual_backward_finalization({is_manual}) on rank {dist.get_rank()}: a "
                "backward has begun and is not completed. Call it before backward, or after "
                "finalize_backward() or reset_iter_state()"
            )
        self.is_manual = is_manual

    def check(self) -> None:
        """Check that backwards can be completed now.

        Raises:
            RuntimeError: the end of each backward does that; a backward is running; or an earlier
                reduction has not been waited for.
        """
        if not self.is_manual:
            _refuse(
                "the end of each backward completes it; call "
                "set_manual_backward_finalization(True) before forward"
            )
        if self.is_finalized:
            _refuse("the handle that an earlier call returned has not been waited for")
        if autograd.in_backward():
            _refuse("a backward is running; call it after backward has returned")

    def end(self, progress: StepProgress) -> None:
        """Note that all gradients are complete, or dropped."""
        if progress is StepProgress.DROPPED:
            self._in_flight.clear()
            self.is_last_backward = True
        if self._step is not None:
            self._step.progress = progress
        self._step = None


def _refuse(reason: str) -> NoReturn:
    raise RuntimeError(f"finalize_backward on rank {dist.get_rank()}: {reason}")
