"""Reading boxes of tensors whose parts lie in files, in any order of storage.

For formats of others, which have no checksums; pieces of our own are read by :mod:`..disk.pieces`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.disk.boxes import Box, fill, whole
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.disk.pieces import narrow
from shardwise.checkpoint.disk.reading import Closing, read_exactly
from shardwise.checkpoint.disk.strict import Links, open_file
from shardwise.checkpoint.formats.source import MIB
from shardwise.errors import CheckpointError

_OPEN_FILES = 64
_MOST_SCRATCH = 4 * MIB


@dataclass(frozen=True)
class Extent:
    """Where the elements of a box of a tensor lie.

    Attributes:
        box: which part of the tensor.
        file: the file.
        start: the byte at which the first element of the box begins.
        strides: in elements, within the box; row after row where ``None``.
    """

    box: Box
    file: Path
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one index to the next, in each dimension."""
        return row_major(self.box.sizes) if self.strides is None else self.strides


class ExtentReader(Closing):
    """Fetches boxes. Holds some open files, and one scratch buffer of at most 4 MiB."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def read(self, extents: Sequence[Extent], box: Box, into: torch.Tensor) -> None:
        """Fill ``into``, of the box's sizes, from the extents of a tensor.

        Raises:
            CheckpointError: a file cannot be read, or is shorter than expected.
        """
        for extent in extents:
            common = extent.box.intersection(box)
            if common is not None:
                target = narrow(into, common.relative_to(box.offsets))
                self._fetch(extent, common.relative_to(extent.box.offsets), target)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _fetch(self, extent: Extent, box: Box, into: torch.Tensor) -> None:
        """Read a box, counted from the extent's first element."""
        steps, size = extent.steps, into.itemsize
        first = sum(a * step for a, step in zip(box.offsets, steps, strict=True)) * size
        reach = (sum((n - 1) * step for n, step in zip(box.sizes, steps, strict=True)) + 1) * size
        if _is_dense(box.sizes, steps) and into.is_contiguous():
            self._read_bytes(extent, first, into.view(-1).view(torch.uint8))
        elif reach <= _MOST_SCRATCH:
            if self._scratch.nbytes < reach:
                self._scratch = torch.empty(_MOST_SCRATCH, dtype=torch.uint8)
            covered = self._scratch[: reach // size * size]
            self._read_bytes(extent, first, covered)
            into.copy_(covered.view(into.dtype).as_strided(box.sizes, steps))
        else:
            # What lies between the elements of the box does not fit either: half at a time.
            dim = max(range(len(steps)), key=lambda d: (box.sizes[d] - 1) * steps[d])
            for half in _halves(box, dim):
                self._fetch(extent, half, narrow(into, half.relative_to(box.offsets)))

    def _read_bytes(self, extent: Extent, first: int, into: torch.Tensor) -> None:
        read_exactly(
            self._handle(extent.file), into.numpy().data, extent.start + first, extent.file
        )

    def _handle(self, file: Path) -> int:
        if file not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file], _ = open_file(file, Links.FOLLOW)
        return self._open[file]


def whole_extent(info: TensorInfo, file: Path, start: int) -> Extent:
    """A tensor that lies in one place, row after row."""
    return Extent(whole(info.shape), file, start)


def check_extents(where: str, info: TensorInfo, extents: Sequence[Extent]) -> None:
    """Check that boxes fill their tensor.

    Raises:
        CheckpointError: one lies outside, two overlap, or there is a gap.
    """
    boxes = [extent.box for extent in extents if extent.box.numel]
    check_boxes(where, info, boxes)


def check_boxes(where: str, info: TensorInfo, boxes: Sequence[Box]) -> None:
    """Check that boxes, none empty, fill a tensor.

    Raises:
        CheckpointError: one lies outside, two overlap, or there is a gap.
    """
    for box in boxes:
        if not box.is_inside(info.shape):
            raise CheckpointError(
                f"{where}: found a piece at {list(box.offsets)} of sizes {list(box.sizes)}, "
                f"expected it inside the shape {list(info.shape)}"
            )
    if not fill(boxes, info.shape):
        raise CheckpointError(
            f"{where}: found gaps or overlaps between {len(boxes)} pieces, expected pieces that "
            f"fill the shape {list(info.shape)} exactly"
        )


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor of these sizes stored row after row."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _is_dense(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether a box lies row after row, without gaps."""
    own = row_major(sizes)
    return all(n == 1 or a == b for n, a, b in zip(sizes, steps, own, strict=True))


def _halves(box: Box, dim: int) -> Iterator[Box]:
    half = box.sizes[dim] // 2
    for first, count in ((0, half), (half, box.sizes[dim] - half)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
        yield Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))
