"""Checkpoints of any format as one thing: tensors by name, plain values, and reading of boxes.

Every format that can be read is a :class:`Source`. What is written is written from a source, a part
of a tensor at a time, so that no more than a buffer of bounded size is ever in memory.

Reading boxes of tensors whose parts lie in files, in any order of storage.

For formats of others, which have no checksums; pieces of our own are read by :mod:`..disk.pieces`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import torch

from shardwise.checkpoint.disk.boxes import Box, boxes_of_span, full_box, is_tiling
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, torch_dtype
from shardwise.checkpoint.disk.files import Closing, Links, open_file, read_exactly
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER, narrow
from shardwise.errors import CheckpointError

MIB = 1 << 20
#: Bytes that reading and writing may keep in memory, unless the caller says otherwise.
DEFAULT_BUFFER = 32 * MIB

Progress = Callable[[int], None]
"""Called with a number of bytes, when so many more have been moved."""


Watch = Callable[[int], Progress]
"""Called with the number of bytes that there are to move, before the first is."""


def no_progress(moved: int) -> None:
    """Nobody wants to know."""


def unwatched(total: int) -> Progress:
    """Nobody is watching."""
    del total
    return no_progress


class Source(Protocol):
    """A checkpoint that is read. Close it, or use it in a ``with`` statement.

    Attributes:
        where: its folder or file, for messages.
        tensors: every tensor, by the keys that lead to it in the saved state:
            ``("model", "layers.0.weight")``.
        values: what is stored beside tensors, in the same way.
        about: lines about the checkpoint, for people.
        placements: how a tensor was cut, in words, where the format tells.
        tied: names of the model's tensors that were another one, with the name of that one, where
            the format tells.
        config: the ``config.json`` of the model, where the format tells; else empty.
    """

    @property
    def where(self) -> Path: ...  # noqa: D102
    @property
    def tensors(self) -> Mapping[StatePath, TensorInfo]: ...  # noqa: D102
    @property
    def values(self) -> Mapping[StatePath, Any]: ...  # noqa: D102
    @property
    def about(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def placements(self) -> Mapping[StatePath, str]: ...  # noqa: D102
    @property
    def tied(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def config(self) -> Mapping[str, Any]: ...  # noqa: D102

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor.

        Args:
            path: of the tensor.
            box: which part, not empty.
            into: of the box's sizes and the tensor's dtype, on the CPU, row after row.

        Raises:
            CheckpointError: what is stored is damaged.
        """

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Source: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class BaseSource(Closing):
    """What sources have in common: they say nothing more, and close themselves."""

    about: Sequence[str] = ()
    placements: Mapping[StatePath, str] = MappingProxyType({})
    tied: Mapping[str, str] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})


class Window:
    """Memory that parts of tensors pass through.

    Args:
        buffer: its bytes.
        progress: told how many bytes have passed.

    Raises:
        ValueError: less than 4096.
    """

    def __init__(self, buffer: int = DEFAULT_BUFFER, progress: Progress = no_progress) -> None:
        if buffer < LEAST_BUFFER:
            raise ValueError(f"buffer: found {buffer} bytes, expected {LEAST_BUFFER} or more")
        self._bytes = buffer // 16 * 16
        self.progress = progress
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """How many bytes may be in memory."""
        return self._bytes

    def parts(
        self, source: Source, path: StatePath, box: Box | None = None
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read a tensor, or a box of it, in parts, in the order of storage.

        Yields:
            The part's place in the tensor, and its elements, which the next part overwrites.
        """
        for part in self.boxes(source.tensors[path], box):
            yield part, self.read(source, path, part)

    def read(self, source: Source, path: StatePath, part: Box) -> torch.Tensor:
        """Read one of the boxes that :meth:`boxes` gives; the next is read over it."""
        dtype = torch_dtype(source.tensors[path].dtype)
        nbytes = part.numel * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(self._bytes, dtype=torch.uint8)
        # A storage of its own, as large as the part: that is what torch.save saves.
        into = torch.frombuffer(self._memory.numpy(), dtype=dtype, count=part.numel)
        into = into.view(part.sizes)
        source.read(path, part, into)
        self.progress(nbytes)
        return into

    def boxes(self, info: TensorInfo, box: Box | None = None) -> Iterator[Box]:
        """The parts that a tensor, or a box of it, is read in."""
        box = full_box(info.shape) if box is None else box
        limit = max(1, _whole_rows(self._bytes // info.itemsize, box.sizes))
        for first in range(0, box.numel, limit):
            for inner in boxes_of_span(box.sizes, first, min(first + limit, box.numel)):
                offsets = tuple(a + b for a, b in zip(box.offsets, inner.offsets, strict=True))
                yield Box(offsets, inner.sizes)

    def chunks(self, source: Source, path: StatePath) -> Iterator[memoryview]:
        """The bytes of a tensor, in order; each chunk is valid until the next is asked for."""
        for _, part in self.parts(source, path):
            yield as_bytes(part)


def _whole_rows(elements: int, sizes: Sequence[int]) -> int:
    """As many elements as are whole rows, or rows of rows; ``elements`` if no row fits."""
    row = 1
    for size in reversed(sizes):
        if row * size > elements:
            break
        row *= max(1, size)
    return elements // row * row


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def model_tensors(source: Source) -> dict[str, StatePath]:
    """The tensors of the model in a source: name in the model -> path.

    Raises:
        CheckpointError: there are none, or two of one name.
    """
    found: dict[str, StatePath] = {}
    for path in source.tensors:
        if path[0] == "model" and found.setdefault(dotted(path[1:]), path) != path:
            raise CheckpointError(f"{source.where}: holds {dotted(path)} twice, expected it once")
    if not found:
        raise CheckpointError(f"{source.where}: holds no model, only {_sections(source)}")
    return found


def _sections(source: Source) -> str:
    return ", ".join(sorted({str(path[0]) for path in source.tensors})) or "plain values"


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


def full_extent(info: TensorInfo, file: Path, start: int) -> Extent:
    """A tensor that lies in one place, row after row."""
    return Extent(full_box(info.shape), file, start)


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
    if not is_tiling(boxes, info.shape):
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
