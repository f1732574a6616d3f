"""The ``.metadata`` of ``torch.distributed.checkpoint``: a pickle that is read without trusting it.

The unpickler knows the dozen classes that such metadata consists of, which only hold values, and
refuses every other name. What they hold is then checked like any stranger's numbers.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

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

from shardwise import _torch
from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.dtypes import dtype_name, torch_dtype
from shardwise.checkpoint.disk.entries import StatePath, TensorInfo
from shardwise.checkpoint.disk.strict import check_number, check_text, refuse
from shardwise.checkpoint.formats.extents import check_boxes
from shardwise.errors import CheckpointError

METADATA = ".metadata"
_VERSION = "1.0.0"
_MAX_BYTES = 1 << 28
_MAX_DIMS = 64

# What pickle.dump makes of such metadata, in the protocols that there are. Numbered memory slots
# (PUT) are missing: a number that lies would make the unpickler take memory for all slots below.
_OPCODES = frozenset(
    re.findall(
        r"\w+",
        """PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
        EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1
        TUPLE2 TUPLE3 NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE
        BINUNICODE""",
    )
)


@dataclass(frozen=True)
class Chunk:
    """Where a part of a tensor, or a value, lies.

    Attributes:
        file: the file's name, inside the folder.
        offset: the byte at which it begins.
        length: its bytes, header included.
        box: which part of the tensor it is; ``None`` for a value.
    """

    file: str
    offset: int
    length: int
    box: Box | None


@dataclass(frozen=True)
class Item:
    """One tensor or value.

    Attributes:
        key: its name in the checkpoint.
        path: the keys that led to it in the state that was saved.
        info: what the tensor is; ``None`` for a value.
        chunks: what a tensor is made of; one for a value.
    """

    key: str
    path: StatePath
    info: TensorInfo | None
    chunks: tuple[Chunk, ...]


class _Unpickler(pickle.Unpickler):
    """Knows what the metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class that the pickle names, if it is one of the few."""
        known = _torch.metadata_classes().get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePosixPath  # where it was saved: only shown, never opened
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")


def read_metadata(folder: Path) -> list[Item]:
    """Every tensor and value of a checkpoint of torch. No code from the file is run.

    Raises:
        CheckpointError: there is no metadata, it is damaged, or it is no such thing.
    """
    file = folder / METADATA
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    if len(data) > _MAX_BYTES:
        refuse(str(file), f"more than {_MAX_BYTES:,} bytes", "metadata")
    try:
        for opcode, _, at in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"{opcode.name} at byte {at}")
        found = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # unpickling damaged data raises whatever it comes upon
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{file}: is no metadata of torch.distributed.checkpoint that can be read without "
            f"running code from it ({reason})"
        ) from None
    try:
        return _items(found, file)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{file}: is damaged ({error})") from None


def _items(found: Any, file: Path) -> list[Item]:
    if not isinstance(found, Metadata):
        refuse(str(file), type(found).__name__, "Metadata")
    paths = found.planner_data if isinstance(found.planner_data, dict) else {}
    stored = found.storage_data
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(stored, dict):
        refuse(str(file), "other than dicts", "what is stored, and where")
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): info
        for index, info in stored.items()
    }
    sizes: dict[str, int] = {}
    items = []
    for key, entry in found.state_dict_metadata.items():
        if not isinstance(key, str):
            refuse(str(file), key, "a name")
        where = f"{file}, {check_text(key, str(file))}"
        path = _path(paths.get(key, (key,)), where)
        info, boxes = _tensor(entry, where) if not _is_value(entry) else (None, [None])
        chunks = []
        for box in boxes:
            # A plain value has no offset; older releases gave it an empty one.
            place = places.get((key, None if box is None else box.offsets))
            chunks.append(_chunk(place, box, where, file.parent, sizes))
        items.append(Item(key, path, info, tuple(chunks)))
    return items


def _is_value(entry: Any) -> bool:
    return isinstance(entry, BytesStorageMetadata)


def _path(path: Any, where: str) -> StatePath:
    if not isinstance(path, tuple) or not 0 < len(path) <= _MAX_DIMS:
        refuse(f"{where}, path", path, "the keys that led to it")
    for key in path:
        if isinstance(key, str):
            check_text(key, f"{where}, path")
        else:
            check_number(key, f"{where}, path", most=10**6)
    return path


def _tensor(entry: Any, where: str) -> tuple[TensorInfo, list[Box]]:
    if not isinstance(entry, TensorStorageMetadata):
        refuse(where, type(entry).__name__, "a tensor or a value")
    try:
        dtype = dtype_name(entry.properties.dtype)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    info = TensorInfo(dtype, _numbers(entry.size, f"{where}, size"))
    check_number(info.nbytes, f"{where}, bytes of shape {list(info.shape)}")
    boxes = [
        Box(_numbers(chunk.offsets, f"{where}, offsets"), _numbers(chunk.sizes, f"{where}, sizes"))
        for chunk in entry.chunks
        if isinstance(chunk, ChunkStorageMetadata)
    ]
    if any(len(box.offsets) != len(box.sizes) for box in boxes):
        refuse(f"{where}, chunks", "offsets and sizes of different length", "as many")
    boxes = [box for box in boxes if box.numel]
    check_boxes(where, info, boxes)
    return info, boxes


def _numbers(values: Any, where: str) -> tuple[int, ...]:
    if not isinstance(values, torch.Size) or len(values) > _MAX_DIMS:
        refuse(where, values, f"at most {_MAX_DIMS} numbers")
    return tuple(check_number(value, where) for value in values)


def _chunk(place: Any, box: Box | None, where: str, folder: Path, sizes: dict[str, int]) -> Chunk:
    if place is None:
        at = "" if box is None else f" at {list(box.offsets)}"
        raise CheckpointError(f"{where}: the metadata does not say where its chunk{at} lies")
    name = place.relative_path
    if not isinstance(name, str) or "/" in name or "\\" in name or name in ("", ".", ".."):
        refuse(f"{where}, file", name, "the name of a file in the folder")
    check_text(name, f"{where}, file")
    if place.transform_descriptors:
        refuse(f"{where}, {name}", f"{place.transform_descriptors}", "chunks that are plain")
    if name not in sizes:
        try:
            sizes[name] = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read ({error.strerror})") from None
    offset = check_number(place.offset, f"{where}, offset")
    length = check_number(place.length, f"{where}, length")
    if offset + length > sizes[name]:
        refuse(f"{where}, bytes in {name}", f"{offset} .. {offset + length}", f"{sizes[name]:,}")
    return Chunk(name, offset, length, box)


def write_metadata(folder: Path, items: Sequence[Item]) -> None:
    """Write the metadata of chunks that are in the folder already."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for item in items:
        if item.info is None:
            entries[item.key] = BytesStorageMetadata()
        else:
            entries[item.key] = TensorStorageMetadata(
                TensorProperties(dtype=torch_dtype(item.info.dtype)),
                torch.Size(item.info.shape),
                [
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                    for box in (chunk.box for chunk in item.chunks)
                    if box is not None
                ],
            )
        for number, chunk in enumerate(item.chunks):
            offsets = None if chunk.box is None else chunk.box.offsets
            index = MetadataIndex(item.key, offsets, None if offsets is None else number)
            places[index] = _torch.storage_info(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(
        entries,
        planner_data={item.key: item.path for item in items},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
    with (folder / METADATA).open("xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
