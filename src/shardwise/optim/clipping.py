"""Clipping of gradients that never exist together, so that their norm is known too late."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence

import torch

from shardwise.optim.norms import NormParts, scale_grads


class ClipBy(enum.Enum):
    """The norm that is compared with ``max_norm``, where the total norm is not known yet.

    ``GROUP_NORM``: the norm of the gradients of the group that steps, over all ranks. One small
    all-reduce for each group.

    ``PREVIOUS_NORM``: the total norm of the step before, so that all groups are scaled alike. One
    small all-reduce for each step. A first step is clipped by group norms.
    """

    GROUP_NORM = "group-norm"
    PREVIOUS_NORM = "previous-norm"


class NonFinite(enum.Enum):
    """What to do with a group whose gradients have a norm that is NaN or infinite.

    ``STEP``: step with it, as an optimizer without a guard does.

    ``SKIP_GROUP``: drop the gradients of the group, which keeps its parameters and its states.
    Other groups step. One small all-reduce for each group, and a wait for its result.
    """

    STEP = "step"
    SKIP_GROUP = "skip-group"


class Clipping:
    """The gradient norm of one step after another, and the scales that follow from it.

    Args:
        max_norm: the largest norm that is not clipped; ``math.inf`` to know the norm alone, and
            ``None`` for neither.
        clip_by: the norm that is compared with it.
        nonfinite: what to do with a group whose norm is not finite.

    Attributes:
        norm: the total norm of the gradients of the last step, before clipping, over all ranks.
            ``None`` if it was not asked for.
        previous: the last total norm that was finite; ``None`` before there is one.
        skipped: the groups that did not make the last step.
    """

    def __init__(self, max_norm: float | None, clip_by: ClipBy, nonfinite: NonFinite) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm: found {max_norm}, expected a number above 0, or None")
        self._max_norm = max_norm
        self._clip_by = ClipBy(clip_by)
        self._nonfinite = NonFinite(nonfinite)
        self.norm: torch.Tensor | None = None
        self.previous: float | None = None
        self.skipped: tuple[str, ...] = ()
        self._parts = NormParts()
        self._squares: list[torch.Tensor] = []
        self._skips: list[str] = []

    @property
    def carries(self) -> bool:
        """Whether the next step depends on the norm of this one."""
        return self.clips and self._clip_by is ClipBy.PREVIOUS_NORM

    @property
    def clips(self) -> bool:
        """Whether gradients may be scaled."""
        return self._max_norm is not None and self._max_norm < math.inf

    def clip(self, name: str, params: Sequence[torch.Tensor]) -> bool:
        """Scale the gradients of a group.

        Args:
            name: the group.
            params: its parameters. Every rank passes the same ones.

        Returns:
            Whether it is to step.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        skips = self._nonfinite is NonFinite.SKIP_GROUP
        if self._max_norm is None and not skips:
            return True
        own = NormParts()
        by_previous = self.carries and self.previous is not None
        wants_own = skips or (self.clips and not by_previous)
        (own if wants_own else self._parts).add(params)
        norm = None
        if wants_own:
            norm = own.total()
            self._squares.append(norm**2)
            if skips and not bool(torch.isfinite(norm)):
                self._skips.append(name)
                return False
        if self.clips:
            divisor = self.previous if by_previous else norm
            assert self._max_norm is not None
            assert divisor is not None
            scale_grads(params, divisor, self._max_norm)
        return True

    def finish(self) -> None:
        """Compute the total norm of the step that is over.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        self.skipped, self._skips = tuple(self._skips), []
        squares, self._squares = self._squares, []
        self.norm = None
        if self._max_norm is None:
            return
        self.norm = (
            self._parts.total() if not squares else functools.reduce(torch.add, squares).sqrt()
        )
        if self.carries:
            found = self.norm.item()
            self.previous = found if math.isfinite(found) else self.previous

    def drop(self) -> None:
        """Forget the step that has begun."""
        self._parts, self._squares, self._skips = NormParts(), [], []
