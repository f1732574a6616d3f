"""The format of ``torch.distributed.checkpoint``, read and written without a process group.

    .metadata        a pickle: which tensors there are, and where their chunks lie
    __0_0.distcp     chunks, each a small file of torch.save, one behind the other

This is the one place where a pickle other than ``torch.save``'s own is read, since the format has
one: :mod:`.dcp_metadata` does it, and runs no code from it. Our own format has none.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.disk.boxes import Box, whole
from shardwise.checkpoint.disk.dtypes import torch_dtype
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.formats.dcp_metadata import (
    METADATA,
    Chunk,
    Item,
    read_metadata,
    write_metadata,
)
from shardwise.checkpoint.formats.extents import Extent, ExtentReader
from shardwise.checkpoint.formats.source import Opened, Source, Window, dotted
from shardwise.checkpoint.formats.torchfile import StoredTensor, read_tree, save
from shardwise.errors import CheckpointError

_MAX_VALUE = 1 << 24
_MAX_FILE = 1 << 32  # bytes, after which another file is begun
_OPTIMIZER = frozenset({"optimizer", "optimizers", "optim"})


class DcpSource(Opened):
    """A checkpoint that ``torch.distributed.checkpoint.save`` made.

    What was saved under ``model`` and ``optimizer`` (or ``optim``) is that; a state dict that was
    saved alone is a model; all else is ``extra``.

    Args:
        where: its folder.

    Raises:
        CheckpointError: there is none, or its metadata is damaged or hostile.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self._reader = ExtentReader()
        self._current: StatePath | None = None
        self._extents: Sequence[Extent] = ()
        items = read_metadata(where)
        self._items = dict(zip(_sections(items), items, strict=True))
        if len(self._items) < len(items):
            raise CheckpointError(f"{where / METADATA}: two entries have one name")
        self.tensors = {
            path: item.info for path, item in self._items.items() if item.info is not None
        }

    @functools.cached_property
    def values(self) -> Mapping[StatePath, Any]:
        """What is stored beside tensors."""
        return {path: self._value(item) for path, item in self._items.items() if item.info is None}

    def read(self, path: StatePath, box: Box, into: torch.Tensor) -> None:
        """Read a part of a tensor; see :class:`.Source`."""
        self._reader.read(self._extents_of(path), box, into)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def _extents_of(self, path: StatePath) -> Sequence[Extent]:
        """Where a tensor lies; remembered for the one that is being read."""
        if self._current != path:
            item = self._items[path]
            self._extents = [self._extent(item, chunk) for chunk in item.chunks]
            self._current = path
        return self._extents

    def _extent(self, item: Item, chunk: Chunk) -> Extent:
        """Where the elements of a chunk lie; reads the chunk's own header."""
        file = self.where / chunk.file
        stored = read_tree(file, chunk.offset, chunk.length)
        where = f"{file}, {item.key} at byte {chunk.offset}"
        assert item.info is not None
        assert chunk.box is not None
        expected = TensorInfo(item.info.dtype, chunk.box.sizes)
        if not isinstance(stored, StoredTensor) or stored.info != expected:
            found = stored.info if isinstance(stored, StoredTensor) else type(stored).__name__
            raise CheckpointError(f"{where}: found {found}, expected {expected} by the metadata")
        return Extent(chunk.box, file, stored.start, stored.strides)

    def _value(self, item: Item) -> Any:
        (chunk,) = item.chunks
        file = self.where / chunk.file
        if chunk.length > _MAX_VALUE:
            raise CheckpointError(
                f"{file}, {item.key}: found a value of {chunk.length:,} bytes, expected "
                f"{_MAX_VALUE:,} at most"
            )
        value = read_tree(file, chunk.offset, chunk.length)
        if _holds_tensor(value):
            raise CheckpointError(
                f"{file}, {item.key}: found tensors inside a value, expected them by themselves"
            )
        return value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return value is not None and not isinstance(
        value, bool | int | float | complex | str | bytes | torch.dtype
    )


def _sections(items: Sequence[Item]) -> list[StatePath]:
    """The paths of a checkpoint of others, so that each begins with model, optimizer or extra."""
    paths = [item.path for item in items]
    first = {path[0] for path in paths}
    if len(first) == 1 and "model" not in first and all(len(path) > 1 for path in paths):
        inner = {path[1] for path in paths}
        if "model" in inner:  # one object held model and optimizer
            paths, first = [path[1:] for path in paths], inner
    if "model" not in first and not first & _OPTIMIZER:
        # A model's state dict, saved alone; what is no tensor was saved beside it.
        return [
            ("model" if item.info is not None else "extra", *path)
            for item, path in zip(items, paths, strict=True)
        ]
    return [_section(path) for path in paths]


def _section(path: StatePath) -> StatePath:
    if len(path) > 1 and path[0] == "model":
        return path
    if len(path) > 1 and path[0] in _OPTIMIZER:
        return ("optimizer", *path[1:])
    return path if len(path) > 1 and path[0] == "extra" else ("extra", *path)


def write_dcp(folder: Path, source: Source, window: Window) -> None:
    """Write everything that a source holds in torch's format.

    ``torch.distributed.checkpoint.load`` finds it under ``model``, ``optimizer`` and ``extra``.
    Chunks are no larger than the window.

    Args:
        folder: an empty folder.
        source: what to write.
        window: the memory to use.

    Raises:
        CheckpointError: the source is damaged.
    """
    files = _Files(folder)
    try:
        items = [_write_tensor(files, path, source, window) for path in source.tensors]
        for root, tree in source.values.items():
            for path, value in _leaves(root, tree):
                chunk = Chunk(*files.append(value), None)
                items.append(Item(dotted(path), path, None, (chunk,)))
    finally:
        files.close()
    write_metadata(folder, items)


def _leaves(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """The values in a tree, taken apart as torch's planner takes a state dict apart."""
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(tree, list) and not _is_leaf(tree):
        for i, item in enumerate(tree):
            yield from _leaves((*path, i), item)
    else:
        yield path, tree


def _is_leaf(tree: Any) -> bool:
    """Whether there are no dicts in a list, nor in lists in it."""
    if isinstance(tree, list):
        return all(map(_is_leaf, tree))
    return not isinstance(tree, dict)


class _Files:
    """The files that chunks go into, one behind the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._file: BinaryIO | None = None

    def append(self, value: Any) -> tuple[str, int, int]:
        """Write a value with ``torch.save``; its file, offset and length."""
        if self._file is not None and self._file.tell() >= _MAX_FILE:
            self.close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._count}.distcp").open("xb")
            self._count += 1
        offset = self._file.tell()
        save(value, self._file)
        return Path(self._file.name).name, offset, self._file.tell() - offset

    def close(self) -> None:
        """See the file that is open onto the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _write_tensor(files: _Files, path: StatePath, source: Source, window: Window) -> Item:
    info = source.tensors[path]
    chunks = [Chunk(*files.append(part), box) for box, part in window.parts(source, path)]
    if not info.numel:
        empty = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        chunks = [Chunk(*files.append(empty), whole(info.shape))]
    return Item(dotted(path), path, info, tuple(chunks))
