"""The format of ``torch.distributed.checkpoint``, read and written without a process group.

    .metadata        a pickle: which tensors there are, and where their chunks are
    __0_0.distcp     chunks, each a small file of torch.save, one after the other

The metadata is a pickle, and is read without trusting it: :mod:`.pickles` runs nothing and creates
no object of a class. Only the names of the dozen classes that such metadata consists of are known;
every other name is refused. The numbers in it are then checked like those of any stranger.

Source: ``torch.distributed.checkpoint.metadata``, and ``FileSystemWriter``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise._torch import c10d
from shardwise.base.boxes import Box, full_box
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, open_file, read_small, size_of, write_new
from shardwise.base.strict import (
    MAX_DIMS,
    check_keys,
    check_number,
    check_shape,
    check_text,
    refuse,
)
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo, dotted, dtype_name, torch_dtype
from shardwise.checkpoint.formats.layouts import flat_groups, grouped, sections
from shardwise.checkpoint.formats.pickles import (
    Constructor,
    PickledObject,
    PickleError,
    load,
    object_constructor,
)
from shardwise.checkpoint.formats.source import (
    Deferred,
    Extent,
    ExtentSource,
    ReadWindow,
    Source,
    check_boxes,
)
from shardwise.checkpoint.formats.torchfile import (
    StoredTensor,
    extent_of,
    leaves_of,
    plain,
    read_parts,
    read_tree,
    save,
    size_of_tensor,
)

METADATA = ".metadata"
_VERSION = "1.0.0"
_MAX_BYTES = 1 << 28
_MAX_STEPS = 1 << 24  # of the pickle: a chunk takes about 60
_FEW = 1 << 16
_MAX_VALUE = 1 << 24
_MAX_FILE = 1 << 32  # bytes, after which another file is begun
_ACCELERATE = ("pytorch_model_fsdp", "optimizer")  # folders, each with a number
_META = "meta.pt"  # what Lightning Fabric saves beside, and where it goes
_BESIDE: StatePath = ("extra", "meta")
_GROUPS: StatePath = ("optimizer", "param_groups")


@dataclass(frozen=True)
class Chunk:
    """Where a part of a tensor, or a value, is stored.

    Attributes:
        file: name of the file, inside the folder.
        offset: byte of the file at which it begins.
        length: its size in bytes, header included.
        box: which part of the tensor it is; ``None`` for a value.
    """

    file: str
    offset: int
    length: int
    box: Box | None


@dataclass(frozen=True)
class Item:
    """A tensor or value of a checkpoint.

    Attributes:
        key: its name in the checkpoint.
        path: the keys that led to it in the saved state.
        info: dtype and shape of the tensor; ``None`` for a value.
        chunks: the chunks of a tensor; a single one for a value.
        folder: the folder that its files are in.
    """

    key: str
    path: StatePath
    info: TensorInfo | None
    chunks: tuple[Chunk, ...]
    folder: Path = Path()


class DcpSource(ExtentSource):
    """A checkpoint that ``torch.distributed.checkpoint.save`` wrote.

    :mod:`.layouts` says what is taken as the model and the optimizer. Everything else is ``extra``,
    and is read when it is asked for.

    Args:
        where: its folder.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata is damaged or hostile.
    """

    where: Path
    versions = None

    def __init__(self, where: Path) -> None:
        super().__init__(where)
        self._current: StatePath | None = None
        self._extents: Sequence[Extent] = ()
        items = [item for folder in folders_of_dcp(where) for item in read_metadata(folder)]
        tensors = frozenset(item.path for item in items if item.info is not None)
        self._items = dict(
            zip(sections([item.path for item in items], tensors), items, strict=True)
        )
        if len(self._items) < len(items):
            raise CheckpointError(f"{where / METADATA}: two entries have the same name")
        self._settings = flat_groups(self._items)
        flat = {path for each in self._settings.values() for path in each.values()}
        self.tensors = {
            path: item.info
            for path, item in self._items.items()
            if item.info is not None and path not in flat
        }
        values = [p for p, item in self._items.items() if item.info is None and p not in flat]
        values += [_GROUPS] if flat else []
        self._beside = self._read_beside()
        values += [path for path in self._beside if path not in self.tensors]
        self.values = Deferred(values, self._value)

    def _value(self, path: StatePath) -> Any:
        """Read a value; what others have is not looked at."""
        if path == _GROUPS and self._settings:
            return list(
                grouped(
                    (name, {key: self._setting(at) for key, at in each.items()})
                    for name, each in self._settings.items()
                )
            )
        if path in self._beside:
            if isinstance(found := self._beside[path], CheckpointError):
                raise found
            return plain(found, f"{self.where / _META}, {dotted(path[2:])}")
        item = self._items[path]
        (chunk,) = item.chunks
        file = item.folder / chunk.file
        if chunk.length > _MAX_VALUE:
            raise CheckpointError(
                f"{file}, {item.key}: found a value of {chunk.length:,} bytes, expected "
                f"at most {_MAX_VALUE:,}"
            )
        return plain(read_tree(file, chunk.offset, chunk.length), f"{file}, {item.key}")

    def _read_beside(self) -> dict[StatePath, Any]:
        """What Lightning saves beside: tensors join the others; an error, if it cannot be read."""
        file = self.where / _META
        if not file.is_file():
            return {}
        try:
            found = dict(leaves_of(_BESIDE, read_parts(file)))
        except CheckpointError as error:
            return {_BESIDE: error}
        stored = {p: each.info for p, each in found.items() if isinstance(each, StoredTensor)}
        self.tensors = {**self.tensors, **stored}
        return found

    def _setting(self, path: StatePath) -> Any:
        """A setting of an optimizer, which may be a tensor with one element."""
        info = self._items[path].info
        if info is None:
            return self._value(path)
        if info.numel != 1:
            refuse(f"{self.where}, {dotted(path)}", info, "a single number")
        found = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        self.read(path, full_box(info.shape), found)
        return found.item()

    def _extents_of(self, path: StatePath) -> Sequence[Extent]:
        """Where a tensor is stored; remembered for the tensor that is being read."""
        if isinstance(found := self._beside.get(path), StoredTensor):
            return [extent_of(self.where / _META, found)]
        if self._current != path:
            item = self._items[path]
            self._extents = [self._extent(item, chunk) for chunk in item.chunks]
            self._current = path
        return self._extents

    def _extent(self, item: Item, chunk: Chunk) -> Extent:
        """Where the elements of a chunk are stored, according to the chunk's own header."""
        file = item.folder / chunk.file
        stored = read_tree(file, chunk.offset, chunk.length)
        where = f"{file}, {item.key} at byte {chunk.offset}"
        assert item.info is not None
        assert chunk.box is not None
        expected = TensorInfo(item.info.dtype, chunk.box.sizes)
        if not isinstance(stored, StoredTensor) or stored.info != expected:
            found = stored.info if isinstance(stored, StoredTensor) else type(stored).__name__
            raise CheckpointError(
                f"{where}: found {found}, expected {expected}, as the metadata says"
            )
        return Extent(chunk.box, file, stored.start, stored.strides, stored.bits)


def folders_of_dcp(where: Path) -> list[Path]:
    """The folders of torch's format that a checkpoint consists of.

    That is its own; or, as Accelerate and ``Trainer`` write it, one for the model and one for the
    optimizer.

    Raises:
        CheckpointError: there are several models.
    """
    models = sorted(each.parent for each in where.glob(f"{_ACCELERATE[0]}_*/{METADATA}"))
    if not models or (where / METADATA).exists():
        return [where]
    if len(models) > 1:
        names = ", ".join(each.name for each in models)
        raise CheckpointError(f"{where}: found several models: {names}; name one of the folders")
    optimizers = [each.parent for each in where.glob(f"{_ACCELERATE[1]}_*/{METADATA}")]
    return models + (optimizers if len(optimizers) == 1 else [])


def write_dcp(folder: Path, source: Source, window: ReadWindow) -> None:
    """Write everything that a source contains in torch's format.

    ``torch.distributed.checkpoint.load`` finds it under ``model``, ``optimizer`` and ``extra``.

    Args:
        folder: an empty folder.
        source: the checkpoint to write.
        window: the buffer to use; chunks are no larger than it.

    Raises:
        CheckpointError: the source is damaged.
        OSError: a file cannot be written.
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
    _write_metadata(folder, items)


def _leaves(path: StatePath, tree: Any) -> Iterator[tuple[StatePath, Any]]:
    """The values in a tree, taken apart in the way of torch's planner."""
    if isinstance(tree, dict) and tree:
        for key, item in tree.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(tree, list) and not _is_leaf(tree):
        for i, item in enumerate(tree):
            yield from _leaves((*path, i), item)
    else:
        yield path, tree


def _is_leaf(tree: Any) -> bool:
    """Whether a list contains no dicts, nor lists that do."""
    if isinstance(tree, list):
        return all(map(_is_leaf, tree))
    return not isinstance(tree, dict)


class _Files:
    """The files that chunks are appended to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._file: BinaryIO | None = None

    def append(self, value: Any) -> tuple[str, int, int]:
        """Write a value with ``torch.save``; returns its file name, offset and length."""
        if self._file is not None and self._file.tell() >= _MAX_FILE:
            self.close()
        if self._file is None:
            self._file = (self._folder / f"__0_{self._count}.distcp").open("xb")
            self._count += 1
        offset = self._file.tell()
        save(value, self._file)
        return Path(self._file.name).name, offset, self._file.tell() - offset

    def close(self) -> None:
        """Close the file that is open, and wait until it is on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _write_tensor(files: _Files, path: StatePath, source: Source, window: ReadWindow) -> Item:
    info = source.tensors[path]
    chunks = [Chunk(*files.append(part), box) for box, part in window.parts(source, path)]
    if not info.numel:
        empty = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        chunks = [Chunk(*files.append(empty), full_box(info.shape))]
    return Item(dotted(path), path, info, tuple(chunks))


_CLASSES = c10d.metadata_classes()
_PLACE = type(c10d.storage_info("", 0, 0))


def _known(module: str, name: str) -> Any:
    """What a name in the pickle stands for: something that metadata consists of, or ``None``."""
    if (module, name) == ("torch", "Size"):
        return Constructor(name, size_of_tensor)
    if (module, name) in _CLASSES:
        return object_constructor(name, _CLASSES[module, name])
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
        return object_constructor(
            name, PurePosixPath
        )  # where it was saved: only shown, never opened
    return None


def read_metadata(folder: Path) -> list[Item]:
    """Read the metadata of a checkpoint. No code from the file is run.

    Args:
        folder: the checkpoint's folder.

    Returns:
        Every tensor and value of the checkpoint.

    Raises:
        CheckpointError: there is no metadata, or it is damaged or hostile.
    """
    file = folder / METADATA
    data = read_small(file, _MAX_BYTES, Links.FOLLOW)
    try:
        found = load(data, _known, _MAX_STEPS, size=size_of(folder))
    except PickleError as error:
        raise CheckpointError(
            f"{file}: is not metadata of torch.distributed.checkpoint that can be read without "
            f"running code from it ({error})"
        ) from None
    return _items(found, file, len(data))


def _items(found: Any, file: Path, nbytes: int) -> list[Item]:
    if not _is_a(found, Metadata):
        refuse(str(file), _kind(found), "Metadata")
    entries, stored = found.get("state_dict_metadata"), found.get("storage_data")
    paths = found.get("planner_data")
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        refuse(str(file), "metadata without dicts", "dicts of what is stored, and where")
    _check_shared(entries, nbytes, str(file))
    places = _places(stored, str(file))
    sizes: dict[str, int] = {}
    items = []
    for key, entry in entries.items():
        if not isinstance(key, str):
            refuse(f"{file}, name", key, "a string")
        where = f"{file}, {check_text(key, f'{file}, name')}"
        path = _path(paths.get(key, (key,)) if isinstance(paths, dict) else (key,), where)
        info, boxes = (
            (None, [None]) if _is_a(entry, BytesStorageMetadata) else _tensor(entry, where)
        )
        chunks = []
        for box in boxes:
            # A value has no offset; older releases gave it an empty one.
            place = places.get((key, None if box is None else _text(box.offsets)))
            if place is None and box is None:
                place = places.get((key, _text(())))
            chunks.append(_chunk(place, box, where, file.parent, sizes))
        items.append(Item(key, path, info, tuple(chunks), file.parent))
    held, needed = sum(sizes.values()), sum(each.length for item in items for each in item.chunks)
    if needed > held:
        refuse(f"{file}, chunks", f"{needed:,} bytes in all", f"at most {held:,}, as in its files")
    return items


def _check_shared(entries: Mapping[Any, Any], nbytes: int, where: str) -> None:
    """Check that many tensors do not share one list of chunks, as each would be checked."""
    most = _FEW + nbytes
    for entry in entries.values():
        chunks = entry.get("chunks") if isinstance(entry, PickledObject) else None
        most -= len(chunks) if isinstance(chunks, list) else 0
        if most < 0:
            refuse(where, "chunks that tensors share", "fewer chunks than the file has bytes")


def _places(stored: Mapping[Any, Any], where: str) -> dict[tuple[str, str | None], Any]:
    """Where each chunk is stored, by name and offsets."""
    found = {}
    for index, place in stored.items():
        name = index.get("fqn") if _is_a(index, MetadataIndex) else None
        if not isinstance(name, str):
            refuse(f"{where}, storage_data", _kind(index), "the index of a chunk")
        offset = index.get("offset")
        numbers = None if offset is None else _numbers(offset, f"{where}, {name!r}, offsets")
        found[name, None if numbers is None else _text(numbers)] = place
    return found


def _text(offsets: tuple[int, ...]) -> str:
    """Offsets as a key. Strings, because thousands of numbers could have the same hash."""
    return ",".join(map(str, offsets))


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, PickledObject) and value.kind is kind


def _kind(value: Any) -> str:
    kind = value.kind if isinstance(value, PickledObject) else type(value)
    return getattr(kind, "__name__", "an object")


def _path(path: Any, where: str) -> StatePath:
    if not isinstance(path, tuple) or not path:
        refuse(f"{where}, path", path, "a tuple of keys")
    check_keys(path, f"{where}, path")
    return path


def _tensor(entry: Any, where: str) -> tuple[TensorInfo, list[Box]]:
    if not _is_a(entry, TensorStorageMetadata):
        refuse(where, _kind(entry), "a tensor or a value")
    try:
        dtype = dtype_name(_dtype(entry.get("properties"), where))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    info = TensorInfo(dtype, _numbers(entry.get("size"), f"{where}, size"))
    check_shape(info.shape, info.itemsize, where)
    chunks = entry.get("chunks")
    if not isinstance(chunks, list):
        refuse(f"{where}, chunks", _kind(chunks), "a list")
    boxes = [
        Box(
            _numbers(chunk.get("offsets"), f"{where}, offsets"),
            _numbers(chunk.get("sizes"), f"{where}, sizes"),
        )
        for chunk in chunks
        if _is_a(chunk, ChunkStorageMetadata)
    ]
    if any(len(box.offsets) != len(box.sizes) for box in boxes):
        refuse(f"{where}, chunks", "offsets and sizes of different lengths", "equal lengths")
    boxes = [box for box in boxes if box.numel]
    check_boxes(where, info, boxes)
    return info, boxes


def _dtype(properties: Any, where: str) -> torch.dtype:
    state = properties.state if _is_a(properties, TensorProperties) else None
    found = state[0] if isinstance(state, tuple) and state else properties
    if not isinstance(found, torch.dtype):
        refuse(f"{where}, properties", _kind(found), "a dtype")
    return found


def _numbers(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, torch.Size) or len(values) > MAX_DIMS:
        refuse(where, values, f"a torch.Size of at most {MAX_DIMS} numbers")
    return tuple(check_number(value, where) for value in values)


def _chunk(place: Any, box: Box | None, where: str, folder: Path, sizes: dict[str, int]) -> Chunk:
    if place is None:
        at = "" if box is None else f" at {list(box.offsets)}"
        raise CheckpointError(f"{where}: the metadata does not say where its chunk{at} is")
    if not _is_a(place, _PLACE):
        refuse(f"{where}, storage_data", _kind(place), "a file and a range of bytes")
    name = place.get("relative_path")
    if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
        refuse(f"{where}, file", name, "the name of a file in the folder")
    check_text(name, f"{where}, file")
    if transforms := place.get("transform_descriptors"):
        refuse(f"{where}, {name}", transforms, "chunks without transforms")
    if name not in sizes:
        handle, sizes[name] = open_file(folder / name, Links.FOLLOW)
        os.close(handle)
    offset = check_number(place.get("offset"), f"{where}, offset")
    length = check_number(place.get("length"), f"{where}, length")
    if offset + length > sizes[name]:
        refuse(f"{where}, bytes in {name}", f"{offset} .. {offset + length}", f"{sizes[name]:,}")
    return Chunk(name, offset, length, box)


def tensor_metadata(info: TensorInfo, boxes: Iterable[Box]) -> TensorStorageMetadata:
    """What torch's metadata says about a tensor that is stored in boxes."""
    return TensorStorageMetadata(
        TensorProperties(dtype=torch_dtype(info.dtype)),
        torch.Size(info.shape),
        [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes],
    )


def _write_metadata(folder: Path, items: Sequence[Item]) -> None:
    """Write the metadata to the folder of the chunks, and wait until it is on the disk."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for item in items:
        if item.info is None:
            entries[item.key] = BytesStorageMetadata()
        else:
            boxes = (chunk.box for chunk in item.chunks if chunk.box is not None)
            entries[item.key] = tensor_metadata(item.info, boxes)
        for number, chunk in enumerate(item.chunks):
            offsets = None if chunk.box is None else chunk.box.offsets
            index = MetadataIndex(item.key, offsets, None if offsets is None else number)
            places[index] = c10d.storage_info(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(
        entries,
        planner_data={item.key: item.path for item in items},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
    write_new(folder / METADATA, pickle.dumps(metadata))
