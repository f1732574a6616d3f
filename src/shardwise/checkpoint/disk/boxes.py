"""Boxes in tensors: where a piece lies, whether pieces fill a tensor, which bytes a box needs.

A box is a tuple of offsets and a tuple of sizes, one per dimension, counted in elements. Elements
are stored row after row. No torch here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PRIME = 2**61 - 1
_BITS = 61


@dataclass(frozen=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets: its first element, in each dimension.
        sizes: its extent, in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it holds."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """What both hold, or ``None``."""
        offsets, sizes = [], []
        for (a, n), (b, m) in zip(self._spans(), other._spans(), strict=True):
            first, end = max(a, b), min(a + n, b + m)
            if first >= end:
                return None
            offsets.append(first)
            sizes.append(end - first)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, counted from another first element."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin, strict=True))
        return Box(offsets, self.sizes)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether it lies in a tensor of this shape."""
        return len(shape) == len(self.offsets) and all(
            a >= 0 and n >= 0 and a + n <= m for (a, n), m in zip(self._spans(), shape, strict=True)
        )

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """The first element, and the one after the last, in the order of storage."""
        if self.numel == 0:
            return 0, 0
        first = last = 0
        for (a, n), m in zip(self._spans(), shape, strict=True):
            first = first * m + a
            last = last * m + a + n - 1
        return first, last + 1

    def _spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.offsets, self.sizes, strict=True)


def full_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_span(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """The boxes that elements ``first`` .. ``end - 1``, in the order of storage, are made of.

    At most ``2 * len(shape) - 1``, in the order of storage. Here ``#`` is the span:

        shape (4, 5)    . . # # #      rest of a row
                        # # # # #      whole rows
                        # # # # #
                        # . . . .      beginning of a row
    """
    if first >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    top, into_top = divmod(first, row)
    bottom, into_bottom = divmod(end, row)
    if into_top:
        end_of_top = min(row, end - top * row)
        yield from _in_row(top, boxes_of_span(inner, into_top, end_of_top))
        top += 1
    if top < bottom:
        yield Box((top, *(0 for _ in inner)), (bottom - top, *inner))
    if into_bottom and top <= bottom:
        yield from _in_row(bottom, boxes_of_span(inner, 0, into_bottom))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.offsets), (1, *box.sizes))


def is_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes, all inside, fill a tensor without gap or overlap.

    Each index of each dimension gets a random weight, and a cell the product of its indices'. The
    weights of all boxes sum to that of the tensor where every cell is in one box. Where one is in
    none or in two, the sums differ as polynomials of the weights, and so by chance agree for one
    choice in 2**54: nobody can know the weights before. The work is linear in the boxes, however
    they were cut.
    """
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    total, whole_weight = 0, 1
    weights = [_Weights() for _ in shape]
    for weight, size in zip(weights, shape, strict=True):
        whole_weight = whole_weight * weight.of(0, size) % _PRIME
    for box in boxes:
        product = 1
        for weight, offset, size in zip(weights, box.offsets, box.sizes, strict=True):
            product = product * weight.of(offset, size) % _PRIME
        total += product
    return total % _PRIME == whole_weight


class _Weights:
    """Random weights of the indices of one dimension, as sums up to where boxes begin and end."""

    def __init__(self) -> None:
        self._up_to: dict[int, int] = {}

    def of(self, offset: int, size: int) -> int:
        """The sum of the weights of ``size`` indices."""
        return self._sum(offset + size) - self._sum(offset)

    def _sum(self, index: int) -> int:
        found = self._up_to.get(index)
        if found is None:
            found = self._up_to[index] = secrets.randbits(_BITS)
        return found
