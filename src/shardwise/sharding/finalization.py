"""Backwards that the user completes, by ``FSDPModule.finalize_backward()``.

Usually the end of a backward completes all reductions. A schedule with several backwards in a step
(a pipeline's) may set ``set_manual_backward_finalization(True)`` instead, and say when. Until then
groups keep what they could not reduce, and reductions that have started go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from shardwise._torch import autograd, fsdp
from shardwise.sharding.group import ParamGroup


class GradientReductionHandle(fsdp.TorchGradientReductionHandle):
    """Reductions under way; see :meth:`FSDPModule.finalize_backward`.

    Args:
        finalization: what the root of the model knows of them; ``None`` if there are none.
    """

    def __init__(self, finalization: Finalization | None) -> None:
        self._finalization = finalization

    def wait(self) -> None:
        """Wait until the sharded gradients are complete. A second call does nothing.

        Raises:
            RuntimeError: ``reset_iter_state()``, or an exception, has dropped the gradients.
            PeerLostError: a peer died or stalled.
        """
        if self._finalization is not None:
            self._finalization.wait_for(self)
            self._finalization = None


class Finalization:
    """Who completes a backward, and what is left for that.

    Args:
        complete: completes all reductions.

    Attributes:
        is_manual: whether the user completes it.
        reducing: the handle that the next forward has to find waited for, if there is one.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self.is_manual = False
        self.reducing: GradientReductionHandle | None = None
        self._complete = complete
        self._has_begun = False
        # Groups whose last backward has left something to reduce.
        self._unreduced: dict[ParamGroup, None] = {}

    def set_manual(self, is_manual: bool) -> None:
        """Let the user complete backwards, or the end of each.

        Raises:
            RuntimeError: a backward has begun, and is not completed.
        """
        if is_manual != self.is_manual and (self._has_begun or autograd.in_backward()):
            raise RuntimeError(
                f"set_manual_backward_finalization({is_manual}) on rank {dist.get_rank()}: a "
                "backward has begun and is not completed. Call it before backward, or after "
                "finalize_backward() or reset_iter_state()"
            )
        self.is_manual = is_manual

    def begin_backward(self) -> None:
        """Note that a backward has begun: until it is completed, the mode cannot change."""
        self._has_begun = True

    def note(self, group: ParamGroup) -> None:
        """Note that a backward of ``group`` is over, which reduced its gradients or kept them."""
        if group.options.requires_gradient_sync:
            self._unreduced.pop(group, None)
        else:
            self._unreduced[group] = None

    def defers(self, group: ParamGroup) -> bool:
        """Decide whether a group whose gradients no hook has reduced is left for later."""
        if not self.is_manual:
            return False
        self._unreduced[group] = None
        return group.options.requires_gradient_sync

    def take(self, group: ParamGroup) -> bool:
        """Return whether ``group`` has been left something to reduce, for the last time."""
        return self._unreduced.pop(group, False) is None

    def check(self) -> None:
        """Check that backwards can be completed now.

        Raises:
            RuntimeError: the end of each backward does that; a backward is running; or an earlier
                reduction has not been waited for.
        """
        if not self.is_manual:
            self._refuse(
                "the end of each backward completes it; call "
                "set_manual_backward_finalization(True) before forward"
            )
        if self.reducing is not None:
            self._refuse("the handle that an earlier call returned has not been waited for")
        if autograd.in_backward():
            self._refuse("a backward is running; call it after backward has returned")

    def wait_for(self, handle: GradientReductionHandle) -> None:
        """Complete the reductions that ``handle`` stands for.

        Raises:
            RuntimeError: the gradients were dropped.
        """
        if self.reducing is not handle:
            raise RuntimeError(
                f"GradientReductionHandle.wait() on rank {dist.get_rank()}: the gradients were "
                "dropped by reset_iter_state(), or after an exception. Run the step again"
            )
        self._complete()

    def end(self) -> None:
        """Note that all reductions are complete, or dropped."""
        self.reducing = None
        self._has_begun = False
        self._unreduced.clear()

    def _refuse(self, reason: str) -> NoReturn:
        raise RuntimeError(f"finalize_backward on rank {dist.get_rank()}: {reason}")
