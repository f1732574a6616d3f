"""The local sum of a reduction: one pass over memory, always in rank order."""

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
        parts: 1-D, of the same length. ``out`` itself may be one of the first two.
        divisor: what to divide the sum by; ``None``: do not divide.
        unscaled: the index of the part that is multiplied by ``factor`` as it is added; only if
            there are at least two parts. ``None``: all parts are scaled already.
        factor: as described for ``unscaled``.
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
    """Return the factor by which the parts of an average may be multiplied before they are added.

    Returns:
        ``1 / world_size`` if the result equals that of a division at the end, bit for bit (down to
        numbers below 1e-38); ``None`` if it does not.
    """
    has_range = dtype in (torch.float32, torch.float64, torch.bfloat16)
    return 1.0 / world_size if has_range and world_size.bit_count() == 1 else None


def wire_dtype(full: torch.Tensor, shard: torch.Tensor) -> torch.dtype:
    """Return the dtype of contributions on the wire: the stored one, if it is exact and smaller."""
    return full.dtype if full.dtype.itemsize < shard.dtype.itemsize else shard.dtype


def scattered_bytes(
    fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], world_size: int
) -> int:
    """Return the bytes of all contributions of a rank to a reduce-scatter, padding included."""
    return sum(
        world_size * shard.numel() * wire_dtype(full, shard).itemsize
        for full, shard in zip(fulls, shards, strict=True)
    )
