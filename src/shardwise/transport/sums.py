"""The local sum of a reduction: one pass over memory, always in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Bytes of the result that are summed at a time, so that they stay in cache.
BLOCK_BYTES = 1024 * 1024


def add_in_order(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    divisor: int | None = None,
    *,
    unscaled: int | None = None,
    factor: float = 1.0,
) -> None:
    """Set ``out`` to ``((parts[0] + parts[1]) + parts[2]) + ...``, divided by ``divisor``.

    Args:
        out: 1-D; its dtype is the dtype of every addition.
        parts: of the same length. ``out`` itself may be one of the first two.
        divisor: divide the sum by it, where given.
        unscaled: the one of ``parts`` that is multiplied by ``factor`` as it is added, where given;
            there are others then.
        factor: see there.
    """
    factors = [factor if i == unscaled else 1.0 for i in range(len(parts))]
    order = list(range(len(parts)))
    if len(parts) > 1 and (parts[1] is out or factors[0] != 1.0):
        order[:2] = 1, 0  # a + b == b + a, bit for bit
    block = max(1, BLOCK_BYTES // out.itemsize)
    first, *rest = [(torch.split(parts[i], block), factors[i]) for i in order]
    for i, total in enumerate(torch.split(out, block)):
        sum_ = first[0][i].to(out.dtype)
        for column, alpha in rest:
            sum_ = torch.add(sum_, column[i].to(out.dtype), alpha=alpha, out=total)
        if sum_ is not total:
            total.copy_(sum_)
        if divisor is not None:
            total.div_(divisor)


def exact_factor(world_size: int, dtype: torch.dtype) -> float | None:
    """What every part of an average may be multiplied by before they are added.

    Returns:
        ``1 / world_size`` where the result is that of a division at the end, bit for bit (down to
        numbers below 1e-38); ``None`` where it is not.
    """
    has_range = dtype in (torch.float32, torch.float64, torch.bfloat16)
    return 1.0 / world_size if has_range and world_size.bit_count() == 1 else None


def wire_dtype(full: torch.Tensor, shard: torch.Tensor) -> torch.dtype:
    """The dtype in which contributions travel: what is stored, if that is exact and fewer bytes."""
    return full.dtype if full.dtype.itemsize < shard.dtype.itemsize else shard.dtype
