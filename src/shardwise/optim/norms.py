"""The norm of sharded gradients, and clipping by it.

:class:`Clipping` is for gradients that never exist together, so that their norm is known too late.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
from shardwise.base.arguments import check_arguments
from shardwise.optim.reductions import Reductions, groups_cutting


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Same API as ``torch.nn.utils.clip_grad_norm_``. Takes sharded and plain parameters, over any mix
    of meshes, with one small all-reduce for each mesh dimension that shards. Every rank calls it
    with the same parameters. The gradients of plain parameters count once: they are assumed to be
    equal on all ranks.

    Args:
        parameters: the parameters whose ``.grad`` is clipped. Those without a gradient are skipped.
        max_norm: the largest norm that is not clipped.
        norm_type: 2 for the Euclidean norm, any other ``p``, ``math.inf`` for the largest
            magnitude, ``-math.inf`` for the smallest, or 0: as in torch, that counts the gradients
            that are not all zero.
        error_if_nonfinite: raise an error if the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, the same on every rank: a 0-dim tensor. As in torch, its dtype is
        the widest dtype of the gradients and of trained ``DTensor``s without one. Norms are
        computed, and gradients scaled, in at least float32. So a norm over 65504, which float16
        cannot represent, is returned as infinite, but gradients are clipped by its true value.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        TypeError: an argument has a wrong type.
        ValueError: ``max_norm`` is NaN, or a parameter is a ``DTensor`` with a pending reduction.
    """
    if isinstance(parameters, nn.Module):
        kind = type(parameters).__name__
        raise TypeError(f"parameters: found the module, a {kind}, expected model.parameters()")
    numbers = isinstance(max_norm, float | int) and isinstance(norm_type, float | int)
    if not (numbers and isinstance(parameters, Iterable)):  # the check takes long, for each step
        check_arguments(clip_grad_norm_, locals())
    elif math.isnan(max_norm):
        raise ValueError("max_norm: found nan, expected a number")
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    params = list(parameters)
    parts = NormParts(float(norm_type))
    dtype = parts.add(params)
    norm = parts.total()
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}; expected a finite number. "
            "Look for the parameter whose gradient is not finite, or pass "
            "error_if_nonfinite=False to continue"
        )
    scale_grads(params, norm, max_norm)
    return norm.to(dtype)


def scale_grads(
    parameters: Iterable[torch.Tensor], norm: torch.Tensor | float, max_norm: float
) -> None:
    """Scale gradients in place so that ``norm``, a norm that they have, becomes ``max_norm``.

    They are not scaled up.
    """
    scale = torch.clamp(max_norm / (torch.as_tensor(norm) + 1e-6), max=1.0)
    found = (dtensor.placed_grad(param) for param in parameters)
    locals_ = [dtensor.plain(grad) for grad in found if grad is not None]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in locals_:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in by_kind.items():
        autograd.foreach_mul_(grads, scale.to(device))


class NormParts:
    """This rank's part of a norm, which grows until :meth:`total` adds up those of all ranks.

    Args:
        norm_type: 2 for the Euclidean norm, or any other that :func:`clip_grad_norm_` takes.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self._norm_type = norm_type
        # By the process groups that gradients are spread over: an extreme; the sum of powers; or,
        # for order 0, how many elements of each gradient are not zero.
        self._parts: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
        self._has_elements = False

    def add(self, parameters: Iterable[torch.Tensor]) -> torch.dtype:
        """Add the gradients of ``parameters``. Every rank adds the same parameters.

        Norms are computed in at least float32: float16 cannot represent the square of 300.

        Returns:
            The widest dtype of the gradients.

        Raises:
            ValueError: a parameter is a ``DTensor`` with a pending reduction.
        """
        params = list(parameters)
        spread, device, dtype = _spread(params)
        wide = torch.promote_types(dtype, torch.float32)
        for groups, grads in spread.items():
            part = _local_norm(grads, self._norm_type, wide, device)
            before = self._parts.get(groups)
            self._parts[groups] = part if before is None else self._sum(before, part)
        if self._norm_type < 0:
            self._has_elements |= any(p.grad is not None and p.numel() > 0 for p in params)
        return dtype

    def total(self) -> torch.Tensor:
        """Compute the norm over all ranks, a 0-dim tensor. What was added is forgotten.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        order, parts, self._parts = self._norm_type, self._parts, {}
        reductions = Reductions("the gradient norm", _OPS.get(order, dist.ReduceOp.SUM))
        for groups, part in parts.items():
            reductions.add(part, groups)
        reductions.run()
        if not parts or (order < 0 and not self._has_elements):
            return torch.zeros(())
        found = functools.reduce(self._sum, parts.values())
        if order == 0:
            return found.count_nonzero().to(found.dtype)
        return found if math.isinf(order) else found ** (1.0 / order)

    def _sum(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if self._norm_type == 0:
            return torch.cat([one, other])
        extreme = _EXTREMES.get(self._norm_type)
        return one + other if extreme is None else extreme(one, other)


#: Norms that are no sums.
_OPS = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}
_EXTREMES = {math.inf: torch.maximum, -math.inf: torch.minimum}


def _spread(
    parameters: Iterable[torch.Tensor],
) -> tuple[dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]], torch.device, torch.dtype]:
    """Group gradients by the process groups that they are sharded over.

    Returns:
        Local gradients by process groups, including groups of parameters without a gradient, so
        that all ranks make the same all-reduces. A ``DTensor`` without one has an empty one there.
        Their device; their widest dtype.
    """
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    device, dtype = torch.device("cpu"), None
    for param in parameters:
        if isinstance(param, DTensor) and any(each.is_partial() for each in param.placements):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} has placements {param.placements}: its "
                "values are pending a reduction. Redistribute it to Shard or Replicate first"
            )
        grads = spread.setdefault(groups_cutting(param), [])
        grad = dtensor.placed_grad(param)
        if grad is not None:
            local = dtensor.plain(grad)
            grads.append(local)
        elif isinstance(param, DTensor):
            local = dtensor.local_of(param)
            grads.append(local.new_empty(0))
        else:
            continue
        device = local.device
        if grad is not None or param.requires_grad:  # other ranks may have its gradient
            dtype = local.dtype if dtype is None else torch.promote_types(dtype, local.dtype)
    return spread, device, torch.float32 if dtype is None else dtype.to_real()


def _local_norm(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """This rank's part of the norm: see ``NormParts``."""
    if norm_type == 0:
        counts = [grad.count_nonzero().to(device, dtype) for grad in grads]
        return torch.stack(counts) if counts else torch.zeros(0, dtype=dtype, device=device)
    grads = [grad for grad in grads if grad.numel() > 0]
    if not grads:
        nothing = math.inf if norm_type == -math.inf else 0.0
        return torch.full((), nothing, dtype=dtype, device=device)
    norms = torch.stack(
        [norm.to(device, dtype) for norm in autograd.foreach_norm(grads, norm_type)]
    )
    if math.isinf(norm_type):
        return norms.max() if norm_type > 0 else norms.min()
    return (norms**norm_type).sum()


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
