"""Files of ``torch.save``: where their tensors lie, and writing tensors that do not fit in memory.

Such a file is a zip archive: a pickle that says what there is, and one record, never compressed,
for each memory that tensors are views of. Reading takes torch's own reader of weights, which runs
no code from the file, and lets it make tensors without memory. Writing lets torch lay out the file
with holes where the memory belongs, and fills the holes.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from shardwise import _torch
from shardwise.checkpoint.disk.dtypes import dtype_name, torch_dtype
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.errors import CheckpointError

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of what follows it
_CENTRAL = struct.Struct("<28xHHH12x")  # lengths of the name, what follows, and a comment
_CENTRAL_CRC = 16
_DESCRIPTOR = b"PK\x07\x08"
_MOST_PICKLE = 2**28


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        info: its dtype and shape.
        start: the byte of the file at which its first element lies.
        end: the byte behind its last.
        strides: in elements.
    """

    info: TensorInfo
    start: int
    end: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class StoredShard:
    """A rank's part of a ``DTensor`` in a file.

    Attributes:
        shape: of the whole.
        local: what the rank had.
    """

    shape: tuple[int, ...]
    local: StoredTensor


def read_tree(path: Path, start: int = 0, length: int | None = None) -> Any:
    """What a file of ``torch.save`` holds, with a :class:`StoredTensor` for every tensor.

    No tensor is read, and no code in the file is run.

    Args:
        path: the file.
        start: the byte at which the archive begins, where it is a part of the file.
        length: its bytes.

    Raises:
        CheckpointError: it is none, is damaged, or holds more than weights and plain values.
    """
    try:
        size = path.stat().st_size
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise CheckpointError(
                f"{path}: is {size} bytes long, expected {start + length} or more"
            )
        with path.open("rb") as file:
            part = _Part(file, start, length)
            records = _records(part, path)
            part.seek(0)
            loaded = _load_without_memory(part)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # torch's reader and zipfile have a dozen kinds of their own
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(
            f"{path}: is no file of torch.save that can be read without running code from it "
            f"({type(error).__name__}: {reason})"
        ) from None
    return _describe(loaded, records, start, str(path))


class _Part(io.RawIOBase):
    """A part of a file, as if it were the whole."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._at = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The place, counted from where the part begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the part."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        """Read what fits."""
        view = memoryview(into).cast("B")
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(view), self._length - self._at)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _records(part: io.RawIOBase, path: Path) -> dict[int, int]:
    """First byte -> length of every record that tensors may lie in."""
    found = {}
    end = part.seek(0, os.SEEK_END)
    with zipfile.ZipFile(part) as archive:
        for item in archive.infolist():
            if item.compress_type != zipfile.ZIP_STORED or item.file_size != item.compress_size:
                raise CheckpointError(f"{path}: {item.filename!r} is compressed, expected it plain")
            part.seek(item.header_offset)
            name, extra = _LOCAL_HEADER.unpack(_exactly(part, _LOCAL_HEADER.size))
            first = item.header_offset + _LOCAL_HEADER.size + name + extra
            if first + item.file_size > end:
                raise CheckpointError(
                    f"{path}: {item.filename!r} ends at byte {first + item.file_size} of {end}"
                )
            if item.filename.endswith("data.pkl") and item.file_size > _MOST_PICKLE:
                raise CheckpointError(f"{path}: its pickle has {item.file_size} bytes")
            if item.filename.endswith("/byteorder"):
                part.seek(first)
                order = _exactly(part, min(item.file_size, 16)).decode("ascii", "replace")
                if order != sys.byteorder:
                    raise CheckpointError(
                        f"{path}: found {order} endian numbers, expected {sys.byteorder}"
                    )
            found[first] = item.file_size
    return found


def _exactly(part: io.RawIOBase, count: int) -> bytes:
    data = part.read(count)
    if data is None or len(data) < count:
        raise CheckpointError("the archive is cut short")
    return data


def _load_without_memory(file: io.RawIOBase) -> Any:
    # A mesh in the file finds no process group here, and needs none.
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return torch.load(file, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    finally:
        logger.setLevel(level)


def _describe(value: Any, records: Mapping[int, int], start: int, where: str) -> Any:
    """The same, with what is known of every tensor in its place."""
    if isinstance(value, dict):
        return {
            key: _describe(item, records, start, f"{where}: {key}") for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = [_describe(item, records, start, where) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, DTensor):
        local = _stored(_torch.local_of(value), records, start, where)
        return StoredShard(tuple(value.shape), local)
    if isinstance(value, torch.Tensor):
        return _stored(value, records, start, where)
    return value


def _stored(
    tensor: torch.Tensor, records: Mapping[int, int], start: int, where: str
) -> StoredTensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{where}: found a {tensor.layout} tensor, expected a dense one")
    try:
        info = TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    at = _torch.offset_in_file(tensor.untyped_storage())
    first = int(tensor.storage_offset())
    strides = tuple(map(int, tensor.stride()))
    reach = sum((n - 1) * step for n, step in zip(info.shape, strides, strict=True)) + 1
    end = (first + reach) * info.itemsize if info.numel else 0
    held = 0 if at is None else records.get(at, 0)
    if at is None or end > held:
        raise CheckpointError(f"{where}: needs {end} bytes, found {held} in the archive")
    begin = start + at + first * info.itemsize
    return StoredTensor(info, begin, start + at + end, strides)


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor in what :func:`write_tree` writes; same name, same memory.

    Attributes:
        name: under which its bytes are asked for.
        info: its dtype and shape.
    """

    name: str
    info: TensorInfo


def write_tree(path: Path, tree: Any, windows: Callable[[str], Iterator[memoryview]]) -> None:
    """Write what ``torch.save`` would, but the bytes of tensors come a few at a time.

    Args:
        path: the file to make.
        tree: plain values, and a :class:`Hole` for every tensor.
        windows: the bytes of a tensor, by its hole's name, in order.
    """
    holes: dict[str, torch.Tensor] = {}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        save(_with_tensors(tree, holes), path)
    places = dict(_places(tree, read_tree(path)))
    sums: dict[int, int] = {}
    with path.open("r+b") as file:
        for name, stored in places.items():
            file.seek(stored.start)
            crc = 0
            for window in windows(name):
                file.write(window)
                crc = zlib.crc32(window, crc)
            assert file.tell() == stored.end, f"{name}: found other bytes than were announced"
            sums[stored.start] = crc
        _write_sums(file, sums)
        file.flush()
        os.fsync(file.fileno())


def save(value: Any, file: Path | BinaryIO) -> None:
    """``torch.save``, which says of a full disk that an assertion of its own failed.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        name = str(file if isinstance(file, Path) else file.name)
        reason = " ".join(str(error).split())[:80]
        message = f"torch.save could not write it; is the disk full? ({reason})"
        raise OSError(errno.EIO, message, name) from error


def _with_tensors(value: Any, holes: dict[str, torch.Tensor]) -> Any:
    """The tree with tensors that have no memory in place of holes."""
    if isinstance(value, Hole):
        if value.name not in holes:
            with _torch.without_memory():
                holes[value.name] = torch.empty(
                    value.info.shape, dtype=torch_dtype(value.info.dtype)
                )
        return holes[value.name]
    if isinstance(value, dict):
        return {key: _with_tensors(item, holes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_with_tensors(item, holes) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _places(tree: Any, stored: Any) -> Iterator[tuple[str, StoredTensor]]:
    """The name of every hole, and where the file has it."""
    if isinstance(tree, Hole):
        yield tree.name, stored
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _places(item, stored[key])
    elif isinstance(tree, list | tuple):
        for item, there in zip(tree, stored, strict=True):
            yield from _places(item, there)


def _write_sums(file: BinaryIO, sums: Mapping[int, int]) -> None:
    """Enter the checksums of filled holes, without which other zip programs refuse the file."""
    with zipfile.ZipFile(file) as archive:
        items = archive.infolist()
        directory = archive.start_dir
    for item in items:
        file.seek(item.header_offset)
        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        first = item.header_offset + _LOCAL_HEADER.size + name + extra
        file.seek(directory)
        name, extra, comment = _CENTRAL.unpack(file.read(_CENTRAL.size))
        if first in sums:
            crc = sums[first].to_bytes(4, "little")
            file.seek(directory + _CENTRAL_CRC)
            file.write(crc)
            file.seek(first + item.file_size)
            if file.read(4) == _DESCRIPTOR:
                file.write(crc)
        directory += _CENTRAL.size + name + extra + comment
