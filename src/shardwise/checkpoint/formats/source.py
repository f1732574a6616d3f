"""Checkpoints of any format, read in one way: tensors by name, plain values, and boxes of tensors.

Every format that can be read is a :class:`Source`. Whatever is written is written from a source, a
part of a tensor at a time through a :class:`ReadWindow`, so that no more than a buffer of bounded
size is ever in memory. Formats other than ours have no checksums: their tensors are extents of
files, which an :class:`ExtentReader` reads. Pieces of our own format are read by
:mod:`..disk.pieces`.
"""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from shardwise.base.boxes import Box, full_box, is_tiling, narrow, row_major
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Closing, Links, open_file, read_exactly
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, torch_dtype
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.disk.safetensors import Chunks, as_bytes
from shardwise.checkpoint.disk.values import unflatten

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_reads import StoreReads

MIB = 1 << 20
#: Bytes that reading and writing may hold in memory by default.
DEFAULT_BUFFER = 32 * MIB

Progress = Callable[[int], None]
"""Called with the number of bytes, each time that some have been moved."""


Watch = Callable[[int], Progress]
"""Called once, with the number of bytes to move; returns what is called as they are moved."""


def no_progress(moved: int) -> None:
    """Ignore the progress."""


def unwatched(total: int) -> Progress:
    """Watch nothing; see :data:`Watch`."""
    del total
    return no_progress


class Source(Closing, abc.ABC):
    """A checkpoint that is open to be read. Close it, or use it in a ``with`` statement.

    Attributes:
        where: its folder or file, or its name in an object store.
        tensors: dtype and shape of every tensor, by path: ``("model", "layers.0.weight")``.
        values: plain values stored beside the tensors, by path.
        about: lines of text that describe the checkpoint.
        placements: how each tensor was sharded, as text, if the format records it.
        tied: for each tied tensor of the model, the name of the tensor that it is tied to, if the
            format records it.
        config: the model's ``config.json``, if the format records it; else empty.
        versions: the version of the state dict of each of the model's modules, by the name that it
            had; ``None`` if the checkpoint is of the classes as they are.
        left_out: what of the files is in none of these, and why; empty if nothing is.
    """

    where: Place
    tensors: Mapping[StatePath, TensorInfo]
    values: Mapping[StatePath, Any]
    about: Sequence[str] = ()
    placements: Mapping[StatePath, str] = MappingProxyType({})
    tied: Mapping[str, str] = MappingProxyType({})
    config: Mapping[str, Any] = MappingProxyType({})
    versions: Mapping[str, int] | None = MappingProxyType({})
    left_out: str = ""

    @abc.abstractmethod
    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor.

        Args:
            path: path of the tensor.
            box: the part to read, not empty.
            into: a contiguous tensor on the CPU, with the sizes of the box and the tensor's dtype.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """

    def expect(self, parts: Iterable[tuple[StatePath, Box]]) -> None:
        """Plan to read parts of tensors, in this order, where that saves requests to a store."""

    def full(self, path: StatePath) -> torch.Tensor:
        """Read a tensor in full.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        info = self.tensors[path]
        full = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        if full.numel():
            self.read(path, full_box(info.shape), full)
        return full


class Deferred(Mapping[StatePath, Any]):
    """Values by path, each read when it is asked for: what nobody needs can be damaged, or code.

    Args:
        paths: the paths of all values.
        read: called with a path, reads the value; raises ``CheckpointError`` if it cannot be read.
    """

    def __init__(self, paths: Iterable[StatePath], read: Callable[[StatePath], Any]) -> None:
        self._paths = dict.fromkeys(paths)
        self._read = functools.cache(read)

    def __getitem__(self, path: StatePath) -> Any:
        if path not in self._paths:
            raise KeyError(path)
        return self._read(path)

    def __contains__(self, path: object) -> bool:
        return path in self._paths  # a mapping's own would read it

    def __iter__(self) -> Iterator[StatePath]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class ReadWindow:
    """A buffer that parts of tensors pass through.

    Args:
        buffer: its size in bytes, at least 4096.
        progress: called with the number of bytes, each time that some have passed.

    Raises:
        ValueError: the buffer is too small.
    """

    def __init__(self, buffer: int = DEFAULT_BUFFER, progress: Progress = no_progress) -> None:
        if buffer < LEAST_BUFFER:
            raise ValueError(f"buffer: found {buffer} bytes, expected {LEAST_BUFFER} or more")
        self._bytes = buffer // 16 * 16
        self.progress = progress
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Size of the buffer in bytes."""
        return self._bytes

    def parts(
        self, source: Source, path: StatePath, box: Box | None = None
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read a tensor, or a box of it, in parts, in row-major order.

        Yields:
            The box of a part in the tensor, and its elements, which the next part overwrites.
        """
        for part in self.boxes(source.tensors[path], box):
            yield part, self.read(source, path, part)

    def read(self, source: Source, path: StatePath, part: Box) -> torch.Tensor:
        """Read one of the boxes that :meth:`boxes` yields. The next read overwrites the result."""
        dtype = torch_dtype(source.tensors[path].dtype)
        nbytes = part.numel * dtype.itemsize
        if self._memory.nbytes < nbytes:
            self._memory = torch.empty(self._bytes, dtype=torch.uint8)
        # A storage of its own, as large as the part, since torch.save saves whole storages.
        into = torch.frombuffer(self._memory.numpy(), dtype=dtype, count=part.numel)
        into = into.view(part.sizes)
        source.read(path, part, into)
        self.progress(nbytes)
        return into

    def boxes(self, info: TensorInfo, box: Box | None = None) -> Iterator[Box]:
        """Cut a tensor, or a box of it, into parts that fit in the buffer, in row-major order."""
        box = full_box(info.shape) if box is None else box
        limit = max(1, _whole_rows(self._bytes // info.itemsize, box.sizes))
        return box.cut(limit)

    def chunks(self, source: Source, path: StatePath) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, in order; each chunk is valid until the next one."""
        for _, part in self.parts(source, path):
            yield as_bytes(part).numpy().data

    def by_name(self, source: Source, paths: Mapping[str, StatePath]) -> Chunks:
        """Return what gives the bytes of tensors by their names, as writers of files take it."""
        return lambda name: self.chunks(source, paths[name])


def _whole_rows(elements: int, sizes: Sequence[int]) -> int:
    """The number of elements, up to ``elements``, that fills complete rows, or groups of rows.

    If not even one row fits, that is ``elements``.
    """
    row = 1
    for size in reversed(sizes):
        if row * size > elements:
            break
        row *= max(1, size)
    return elements // row * row


#: Where the trainings of this package record that a checkpoint leaves out a base, and which.
_BASE = ("extra", "base", "name")


def model_tensors(source: Source) -> dict[str, StatePath]:
    """The tensors of the model in a source: path in the source, by name in the model.

    Raises:
        CheckpointError: there are none, two have the same name, or the checkpoint has adapters
            alone, without the base that they belong to.
    """
    if _BASE in source.values:
        raise CheckpointError(
            f"{source.where}: contains the adapters of a training with --lora alone, without their "
            f"base {source.values[_BASE]}; shardwise merge-lora makes full weights of the adapters "
            "that a run writes at its end"
        )
    found: dict[str, StatePath] = {}
    for path in source.tensors:
        if path[0] == "model" and found.setdefault(dotted(path[1:]), path) != path:
            raise CheckpointError(f"{source.where}: found {dotted(path)} twice, expected it once")
    if not found:
        sections = ", ".join(sorted({str(path[0]) for path in source.tensors})) or "plain values"
        raise CheckpointError(f"{source.where}: contains no model, only {sections}")
    return found


def extra_states(source: Source) -> dict[str, Any]:
    """The extra states of modules in a source, by name, if they are not single tensors.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    found: list[tuple[StatePath, Any]] = []
    for path in (*source.tensors, *source.values):
        if path[0] == "model" and (length := _extra_state(path)):
            value = source.values[path] if path in source.values else source.full(path)
            if path in source.values or length < len(path):
                found.append(((dotted(path[1:length]), *path[length:]), value))
    return unflatten(found, str(source.where))


def _extra_state(path: StatePath) -> int:
    """How much of a path leads to the extra state of a module; 0 if it does not."""
    ends = (i + 1 for i, key in enumerate(path) if str(key).rpartition(".")[2] == "_extra_state")
    return next(ends, 0)


#: Torch's bits of tensors whose memory has other elements: ``"conj"``, ``"neg"``.
LazyBits = frozenset[str]

_OPEN_FILES = 64
_MOST_SCRATCH = 4 * MIB


@dataclass(frozen=True)
class Extent:
    """Where the elements of a box of a tensor are in a file.

    Attributes:
        box: which part of the tensor it is.
        file: path of the file, or its name in an object store.
        start: byte of the file at which the first element of the box begins.
        strides: strides inside the box, in elements.
        bits: what is done to elements once they are read.
    """

    box: Box
    file: Place
    start: int
    strides: tuple[int, ...]
    bits: LazyBits = frozenset()


class ExtentReader(Closing):
    """A reader of boxes of tensors. It holds at most 64 open files and 4 MiB of scratch memory.

    Args:
        stored: what reads files in an object store; ``None`` if there are none.
    """

    def __init__(self, stored: StoreReads | None = None) -> None:
        self._stored = stored
        self._open: dict[Path, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def read(self, extents: Sequence[Extent], box: Box, into: torch.Tensor) -> None:
        """Read a box of a tensor from its extents.

        Args:
            extents: the extents that the tensor consists of.
            box: the part of the tensor to read.
            into: a tensor on the CPU with the sizes of the box.

        Raises:
            CheckpointError: a file cannot be read, or is shorter than expected.
        """
        for extent in extents:
            common = extent.box.intersection(box)
            if common is not None:
                target = narrow(into, common.relative_to(box.offsets))
                self._fetch(extent, common.relative_to(extent.box.offsets), target)
                if "conj" in extent.bits:
                    torch.view_as_real(target)[..., 1].neg_()
                if "neg" in extent.bits:
                    target.neg_()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])
        if self._stored is not None:
            self._stored.close()

    def _fetch(self, extent: Extent, box: Box, into: torch.Tensor) -> None:
        """Read a box whose offsets are relative to the extent."""
        steps, size = extent.strides, into.itemsize
        first = sum(a * step for a, step in zip(box.offsets, steps, strict=True)) * size
        reach = (sum((n - 1) * step for n, step in zip(box.sizes, steps, strict=True)) + 1) * size
        if _is_dense(box.sizes, steps) and into.is_contiguous():
            self._read_bytes(extent, first, as_bytes(into))
        elif reach <= _MOST_SCRATCH:
            if self._scratch.nbytes < reach:
                self._scratch = torch.empty(_MOST_SCRATCH, dtype=torch.uint8)
            covered = self._scratch[: reach // size * size]
            self._read_bytes(extent, first, covered)
            into.copy_(covered.view(into.dtype).as_strided(box.sizes, steps))
        else:
            # Together with what is between its elements, the box does not fit: halve it.
            dim = max(range(len(steps)), key=lambda d: (box.sizes[d] - 1) * steps[d])
            for half in _halves(box, dim):
                self._fetch(extent, half, narrow(into, half.relative_to(box.offsets)))

    def _read_bytes(self, extent: Extent, first: int, into: torch.Tensor) -> None:
        file, data, at = extent.file, into.numpy().data, extent.start + first
        if isinstance(file, Path):
            read_exactly(self._handle(file), data, at, file)
        else:
            assert self._stored is not None
            self._stored.read(file.name, data, at)

    def _handle(self, file: Path) -> int:
        if file not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file], _ = open_file(file, Links.FOLLOW)
        return self._open[file]


class ExtentSource(Source):
    """A source whose tensors are extents of files.

    Args:
        where: its folder or file, or its name in an object store.
        stored: what reads its files there.
    """

    def __init__(self, where: Place, stored: StoreReads | None = None) -> None:
        self.where = where
        self._reader = ExtentReader(stored)

    @abc.abstractmethod
    def _extents_of(self, path: StatePath) -> Sequence[Extent]:
        """Where a tensor is stored."""

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        self._reader.read(self._extents_of(path), box, into)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()


def check_boxes(where: str, info: TensorInfo, boxes: Sequence[Box]) -> None:
    """Check that non-empty boxes cover a tensor without gaps or overlaps.

    Args:
        where: the file and the tensor, for error messages.
        info: dtype and shape of the tensor.
        boxes: the boxes, in any order.

    Raises:
        CheckpointError: a box is outside the tensor, two overlap, or there is a gap.
    """
    for box in boxes:
        if not box.is_inside(info.shape):
            raise CheckpointError(
                f"{where}: found a piece at {list(box.offsets)} with sizes {list(box.sizes)}, "
                f"expected one inside the shape {list(info.shape)}"
            )
    if not is_tiling(boxes, info.shape):
        raise CheckpointError(
            f"{where}: found gaps or overlaps between {len(boxes)} pieces, expected pieces that "
            f"cover the shape {list(info.shape)} exactly"
        )


def _is_dense(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Whether a box is stored in row-major order without gaps."""
    own = row_major(sizes)
    return all(n == 1 or a == b for n, a, b in zip(sizes, steps, own, strict=True))


def _halves(box: Box, dim: int) -> Iterator[Box]:
    half = box.sizes[dim] // 2
    for first, count in ((0, half), (half, box.sizes[dim] - half)):
        offsets = (*box.offsets[:dim], box.offsets[dim] + first, *box.offsets[dim + 1 :])
        yield Box(offsets, (*box.sizes[:dim], count, *box.sizes[dim + 1 :]))
