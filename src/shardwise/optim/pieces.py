"""Pieces of tensors, so that what is computed in between takes little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: The most elements of a piece, unless a single row has more. On CPUs, smaller ones are hardly
#: faster, and each costs a rehearsal and an accelerator as much as a whole tensor.
AT_ONCE = 1 << 21


def pieces_of_stack(shape: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of a stack of matrices: which matrices, and which of their rows.

    Args:
        shape: number of matrices, rows and columns.
    """
    count, rows, columns = shape
    if not count * rows * columns:
        return
    matrices = max(1, AT_ONCE // (rows * columns))
    height = rows if rows * columns <= AT_ONCE else max(1, AT_ONCE // columns)
    for first in range(0, count, matrices):
        for top in range(0, rows, height):
            yield slice(first, first + matrices), slice(top, top + height)


def pieces_of(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same piece of tensors of one shape, again and again, until all were yielded."""
    first = tensors[0]
    if first.ndim == 0 or first.numel() <= AT_ONCE:
        yield tuple(tensors)
        return
    rows = max(1, AT_ONCE * len(first) // first.numel())
    yield from zip(*(torch.split(each, rows) for each in tensors), strict=True)
