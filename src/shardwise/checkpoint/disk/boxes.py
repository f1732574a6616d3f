"""Boxes in tensors: where a piece lies, whether pieces fill a tensor, which bytes a box needs.

A box is a tuple of offsets and a tuple of sizes, one per dimension, counted in elements. Elements
are stored row after row. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_DEEPEST = 16  # cuts within cuts; a mesh makes as many as the tensor has dimensions


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


def whole(shape: Sequence[int]) -> Box:
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


def fill(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes, all inside, fill a tensor without gap or overlap, cut after cut across.

    That is how meshes cut tensors. Boxes that fill a tensor like a pinwheel, where no cut goes
    across, are refused, and so are cuts within cuts within cuts: nobody can make this slow.
    """
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    # Of the right volume in sum, they fill the tensor if and only if no two overlap.
    waiting = [(list(boxes), 0)]
    while waiting:
        some, depth = waiting.pop()
        if len(some) < 2:
            continue
        if depth == _DEEPEST:
            return False
        for dim in range(len(shape)):
            slabs = list(_slabs(some, dim))
            if len(slabs) > 1:
                waiting += [(slab, depth + 1) for slab in slabs]
                break
        else:
            return False
    return True


def _slabs(boxes: list[Box], dim: int) -> Iterator[list[Box]]:
    """The same boxes, parted wherever a cut across one dimension meets none of them."""
    slab: list[Box] = []
    reach = 0
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        if slab and box.offsets[dim] >= reach:
            yield slab
            slab = []
        slab.append(box)
        reach = max(reach, box.offsets[dim] + box.sizes[dim])
    yield slab
