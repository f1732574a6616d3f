"""Boxes: rectangular parts of tensors, and which bytes they occupy.

A box has offsets and sizes, one of each per dimension, counted in elements. Elements are stored in
row-major order. Torch is not imported.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

_PRIME = 2**31 - 1  # products of two numbers below it have 62 bits
_ROUNDS = 2


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offsets: index of its first element in each dimension.
        sizes: number of indices in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The box of the elements that both have, or ``None`` if there are none."""
        offsets, sizes = [], []
        for (a, n), (b, m) in zip(self._spans(), other._spans(), strict=True):
            first, end = max(a, b), min(a + n, b + m)
            if first >= end:
                return None
            offsets.append(first)
            sizes.append(end - first)
        return Box(tuple(offsets), tuple(sizes))

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, with offsets counted from ``origin``."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin, strict=True))
        return Box(offsets, self.sizes)

    def cut(self, most: int) -> Iterator[Box]:
        """Cut it into boxes of at most ``most`` elements, or fewer, in row-major order."""
        for first in range(0, self.numel, most):
            for inner in boxes_of_span(self.sizes, first, min(first + most, self.numel)):
                offsets = tuple(a + b for a, b in zip(self.offsets, inner.offsets, strict=True))
                yield Box(offsets, inner.sizes)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.offsets) and all(
            a >= 0 and n >= 0 and a + n <= m for (a, n), m in zip(self._spans(), shape, strict=True)
        )

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """The range of elements, in row-major order, from its first to its last.

        Args:
            shape: shape of the tensor that the box is part of.

        Returns:
            The index of its first element, and the index after its last; ``(0, 0)`` if it is empty.
        """
        if self.numel == 0:
            return 0, 0
        first = last = 0
        for (a, n), m in zip(self._spans(), shape, strict=True):
            first = first * m + a
            last = last * m + a + n - 1
        return first, last + 1

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where its elements lie in a tensor, as runs of consecutive elements, ascending.

        Args:
            shape: shape of the tensor that the box is part of.

        Yields:
            Index of the first element of a run, in row-major order, and its length.
        """
        if not self.numel:
            return
        deepest = max((dim for dim in range(len(shape)) if self.sizes[dim] < shape[dim]), default=0)
        length, steps = math.prod(self.sizes[deepest:]), row_major(shape)
        rows = [range(a, a + n) for a, n in self._spans()][:deepest]
        for index in itertools.product(*rows, *((a,) for a in self.offsets[deepest:])):
            yield sum(i * step for i, step in zip(index, steps, strict=True)), length

    @property
    def indices(self) -> str:
        """Its indices in each dimension, ``"0:2,0:5"``."""
        return ",".join(f"{a}:{a + n}" for a, n in self._spans())

    def _spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.offsets, self.sizes, strict=True)


def full_box(shape: Sequence[int]) -> Box:
    """The box of a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor in row-major order."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """The view of a part of a tensor.

    Args:
        tensor: the tensor.
        box: the part, inside the tensor.
    """
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def boxes_of_span(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Cut a range of elements, in row-major order, into boxes.

    There are at most ``2 * len(shape) - 1`` boxes, in row-major order. Here ``#`` is the range:

        shape (4, 5)    . . # # #      rest of a row
                        # # # # #      full rows
                        # # # # #
                        # . . . .      beginning of a row

    Args:
        shape: shape of the tensor.
        first: index of the first element of the range.
        end: index after its last element.
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
    """Whether boxes, all inside a tensor, cover it without gaps or overlaps."""
    if len(boxes) == 1:
        return boxes[0].numel == math.prod(shape)
    import numpy as np  # of no use to what only has boxes

    numbers = [(*box.offsets, *box.sizes) for box in boxes]
    columns = [*np.array(numbers, np.int64).reshape(len(boxes), 2 * len(shape)).T]
    return are_tiling(columns[: len(shape)], columns[len(shape) :], len(boxes), shape)


def are_tiling(
    offsets: Sequence[NDArray[np.int64]],
    sizes: Sequence[NDArray[np.int64]],
    count: int,
    shape: Sequence[int],
) -> bool:
    """Whether boxes in columns, all inside a tensor, cover it without gaps or overlaps.

    Every index of every dimension gets a random weight, and every element the product of the
    weights of its indices. If every element is in exactly one box, then the weights of the boxes
    sum to the weight of the tensor. If one is in none or in two, the sums differ as polynomials in
    the weights, so they agree by chance for one choice in 2**50, and no one can know the choice
    beforehand. The work is in proportion to the number of boxes, however they were cut.

    Args:
        offsets: by dimension, the indices at which boxes begin.
        sizes: by dimension, how many indices they have.
        count: number of boxes; less than 2**31.
        shape: shape of the tensor.
    """
    import numpy as np

    if not count or not math.prod(shape):
        return not math.prod(shape)
    # Where boxes have all indices, the weights of all have the same factor.
    columns = zip(offsets, sizes, shape, strict=True)
    cut = [each for each in columns if each[0].any() or (each[1] != each[2]).any()]
    if len(cut) == 1:  # by rows, as most are
        ((starts, lengths, size),) = cut
        ends = starts + lengths
        if starts[0] == 0 and ends[-1] == size and (starts[1:] == ends[:-1]).all():
            return True
    weights = np.ones((_ROUNDS, count), np.int64)
    total = np.ones(_ROUNDS, np.int64)
    for starts, lengths, size in cut:
        bounds = np.concatenate([starts, starts + lengths, np.array([0, size])])
        found, at = np.unique(bounds, return_inverse=True)
        drawn = np.frombuffer(secrets.token_bytes(4 * _ROUNDS * len(found)), np.uint32)
        # The sums of the weights of all indices before each bound.
        sums = (drawn.astype(np.int64) % _PRIME).reshape(_ROUNDS, -1)[:, at]
        weights = weights * ((sums[:, count:-2] - sums[:, :count]) % _PRIME) % _PRIME
        total = total * ((sums[:, -1] - sums[:, -2]) % _PRIME) % _PRIME
    return bool((weights.sum(axis=1) % _PRIME == total).all())
