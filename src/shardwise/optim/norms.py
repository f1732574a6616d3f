"""The norm of sharded gradients, and clipping gradients by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise._torch import autograd, dtensor
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
        norm_type: 2 for the Euclidean norm, any other positive ``p``, or ``math.inf``.
        error_if_nonfinite: raise an error if the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, the same on every rank: a 0-dim tensor. As in torch, its dtype is
        the widest dtype of the gradients and of trained ``DTensor``s without one. Norms are
        computed, and gradients scaled, in at least float32. So a norm over 65504, which float16
        cannot represent, is returned as infinite, but gradients are clipped by its true value.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
        ValueError: a parameter is a ``DTensor`` with a pending reduction.
    """
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
    locals_ = [dtensor.plain(param.grad) for param in parameters if param.grad is not None]
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in locals_:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in by_kind.items():
        autograd.foreach_mul_(grads, scale.to(device))


class NormParts:
    """This rank's part of a norm, which grows until :meth:`total` adds up those of all ranks.

    Args:
        norm_type: 2 for the Euclidean norm, any other positive ``p``, or ``math.inf``.
    """

    def __init__(self, norm_type: float = 2.0) -> None:
        self._norm_type = norm_type
        # The largest element, or the sum of powers, by the process groups that it is spread over.
        self._parts: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> torch.dtype:
        """Add the gradients of ``parameters``. Every rank adds the same parameters.

        Norms are computed in at least float32: float16 cannot represent the square of 300.

        Returns:
            The widest dtype of the gradients.

        Raises:
            ValueError: a parameter is a ``DTensor`` with a pending reduction.
        """
        spread, device, dtype = _spread(parameters)
        wide = torch.promote_types(dtype, torch.float32)
        for groups, grads in spread.items():
            part = _local_norm(grads, self._norm_type, wide, device)
            before = self._parts.get(groups)
            self._parts[groups] = part if before is None else self._sum(before, part)
        return dtype

    def total(self) -> torch.Tensor:
        """Compute the norm over all ranks, a 0-dim tensor. What was added is forgotten.

        Raises:
            PeerLostError: a peer died or stalled.
        """
        found: torch.Tensor | None = None
        op = dist.ReduceOp.MAX if math.isinf(self._norm_type) else dist.ReduceOp.SUM
        reductions = Reductions("the gradient norm", op)
        for groups, part in self._parts.items():
            reductions.add(part, groups)
        reductions.run()
        for part in self._parts.values():
            found = part if found is None else self._sum(found, part)
        self._parts = {}
        if found is None:
            return torch.zeros(())
        return found if math.isinf(self._norm_type) else found ** (1.0 / self._norm_type)

    def _sum(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(one, other) if math.isinf(self._norm_type) else one + other


def _spread(
    parameters: Iterable[torch.Tensor],
) -> tuple[dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]], torch.device, torch.dtype]:
    """Group gradients by the process groups that they are sharded over.

    Returns:
        Local gradients by process groups, including groups of parameters without a gradient, so
        that all ranks make the same all-reduces; their device; their widest dtype.
    """
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    device, dtype = torch.device("cpu"), None
    for param in parameters:
        _check_complete(param)
        grads = spread.setdefault(groups_cutting(param), [])
        if param.grad is not None:
            local = dtensor.plain(param.grad)
            grads.append(local)
        elif isinstance(param, DTensor):
            local = dtensor.local_of(param)
        else:
            continue
        device = local.device
        if param.grad is not None or param.requires_grad:  # other ranks may have its gradient
            dtype = local.dtype if dtype is None else torch.promote_types(dtype, local.dtype)
    return spread, device, torch.float32 if dtype is None else dtype.to_real()


def _check_complete(param: torch.Tensor) -> None:
    """Check that the values of a parameter are not pending a reduction."""
    if isinstance(param, DTensor) and any(each.is_partial() for each in param.placements):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has placements {param.placements}: its "
            "values are pending a reduction. Redistribute it to Shard or Replicate first"
        )


def _local_norm(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """This rank's part of the norm: the largest element, or the sum of ``norm_type``-th powers."""
    grads = [grad for grad in grads if grad.numel() > 0]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(
        [norm.to(device, dtype) for norm in autograd.foreach_norm(grads, norm_type)]
    )
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
