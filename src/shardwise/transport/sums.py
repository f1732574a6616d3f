"""The local sum of a reduction: one pass over memory, always in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Bytes of the result that are summed at a time, so that they stay in cache.
BLOCK_BYTES = 1024 * 1024


def add_in_order(
    out: torch.Tensor, parts: Sequence[torch.Tensor], divisor: int | None = None
) -> None:
    """Set ``out`` to ``((parts[0] + parts[1]) + parts[2]) + ...``, divided by ``divisor``.

    Args:
        out: 1-D; its dtype is the dtype of every addition.
        parts: of the same length. ``out`` itself may be one of the first two.
        divisor: divide the sum by it, where given.
    """
    first, rest = parts[0], parts[1:]
    if rest and rest[0] is out:  # a + b == b + a, bit for bit
        first, rest = out, [first, *rest[1:]]
    block = max(1, BLOCK_BYTES // out.itemsize)
    columns = [torch.split(part, block) for part in rest]
    starts = torch.split(first, block)
    for i, total in enumerate(torch.split(out, block)):
        sum_ = starts[i].to(out.dtype)
        for column in columns:
            sum_ = torch.add(sum_, column[i].to(out.dtype), out=total)
        if sum_ is not total:
            total.copy_(sum_)
        if divisor is not None:
            total.div_(divisor)


def wire_dtype(full: torch.Tensor, shard: torch.Tensor) -> torch.dtype:
    """The dtype in which contributions travel: what is stored, if that is exact and fewer bytes."""
    return full.dtype if full.dtype.itemsize < shard.dtype.itemsize else shard.dtype
