"""The header of a safetensors file: read from strangers, and made. No torch here.

    8 bytes     how long the header is
    header      JSON: of each tensor its dtype, shape, and first and last byte among the elements
    elements    tensor after tensor

Source: the safetensors format.

Plain safetensors files: the header of a stranger, and writing a file front to back.

Tensors follow each other with neither gaps nor overlaps. Source: the safetensors format.

Write a safetensors file from where the tensors lie.

Nothing is gathered in memory first: bytes go from the tensor to the file, and are hashed on the
way, while the processor has them at hand. Meanwhile another thread asks for what is written already
to go to the disk, so that the sync at the end has little left to wait for.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from shardwise.checkpoint.disk.entries import DTYPE_NAMES, TensorInfo, itemsize
from shardwise.checkpoint.disk.files import Links, open_file, read_exactly
from shardwise.checkpoint.disk.strict import (
    Fields,
    check_number,
    check_shape,
    check_text,
    parse,
    refuse,
)
from shardwise.errors import CheckpointError

#: The longest header that the safetensors library reads.
MAX_HEADER = 100_000_000
_ALIGN = 64  # bytes: elements begin where a cache line does


def read_fields(handle: int, size: int, file: Path) -> tuple[int, dict[str, Any]]:
    """What the header of an open file says; what it says is not checked.

    Args:
        handle: of the file.
        size: of the file in bytes.
        file: for messages.

    Returns:
        The byte at which the elements begin, and the fields.

    Raises:
        CheckpointError: the header is truncated, too long, or not one of such a file.
    """
    if size < 8:
        refuse(str(file), f"{size} bytes", "the header of a safetensors file")
    prefix = bytearray(8)
    read_exactly(handle, memoryview(prefix), 0, file)
    length = int.from_bytes(prefix, "little")
    where = f"{file}, header"
    check_number(length, f"{where}, length", least=2, most=min(MAX_HEADER, max(2, size - 8)))
    text = bytearray(length)
    read_exactly(handle, memoryview(text), 8, file)
    return 8 + length, Fields(parse(bytes(text), where), where).all()


def make_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the elements.

    Args:
        tensors: what is in the file, in the order in which it follows.
        metadata: what else the header says; none where it is empty.

    Raises:
        CheckpointError: there are more tensors than fit in a header.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, info in tensors.items():
        start, end = end, end + info.nbytes
        fields[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"found {len(tensors):,} tensors, more than fit in the header of one safetensors file; "
            "write more files (--max-shard-size)"
        )
    return len(text).to_bytes(8, "little") + text


Chunks = Callable[[str], Iterator[memoryview]]
_MAX_DIMS = 64
#: Files are of PyTorch: what transformers asks for before it loads one.
METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file.

    Attributes:
        info: its dtype and shape.
        start: the byte at which its first element begins.
    """

    info: TensorInfo
    start: int


def read_header(file: Path) -> dict[str, Place]:
    """Every tensor of a file, by name. Nothing else of the file is read.

    Symbolic links are followed, which is how the cache of Hugging Face keeps files.

    Raises:
        CheckpointError: it is no safetensors file, or its header tells lies.
    """
    handle, size = open_file(file, Links.FOLLOW)
    try:
        data, fields = read_fields(handle, size, file)
    finally:
        os.close(handle)
    places = {
        name: _place(name, entry, f"{file}, {name!r}", data)
        for name, entry in fields.items()
        if name != "__metadata__"
    }
    _check_order(places, data, size, file)
    return places


def _place(name: str, entry: Any, where: str, data: int) -> Place:
    check_text(name, where)
    fields = Fields(entry, where)
    dtype = fields.text("dtype")
    if dtype not in DTYPE_NAMES:
        refuse(f"{where}, 'dtype'", dtype, f"one of {', '.join(sorted(NAMES))}")
    info = TensorInfo(dtype, fields.numbers("shape", _MAX_DIMS))
    check_shape(info.shape, info.itemsize, where)
    offsets = fields.numbers("data_offsets", 2)
    if len(offsets) != 2 or offsets[1] - offsets[0] != info.nbytes:
        refuse(f"{where}, 'data_offsets'", list(offsets), f"two, {info.nbytes} bytes apart")
    return Place(info, data + offsets[0])


def _check_order(places: Mapping[str, Place], data: int, size: int, file: Path) -> None:
    """Tensors follow each other, from the header to the end of the file."""
    at = data
    for name, place in sorted(
        places.items(), key=lambda item: (item[1].start, item[1].info.nbytes)
    ):
        if place.start != at:
            refuse(f"{file}, {name!r}, first byte", place.start - data, str(at - data))
        at += place.info.nbytes
    if at != size:
        refuse(str(file), f"{size:,} bytes", f"{at:,}, as its header says")


def write_safetensors(file: Path, tensors: Mapping[str, TensorInfo], chunks: Chunks) -> None:
    """Write a file front to back.

    Args:
        file: a new file.
        tensors: what goes into it.
        chunks: given a name, the bytes of that tensor, in order.
    """
    with file.open("xb") as opened:
        ordered = in_order(tensors)
        opened.write(make_header(ordered, METADATA))
        for name, info in ordered.items():
            _write(opened, name, info, chunks(name))
        opened.flush()
        os.fsync(opened.fileno())


def in_order(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The order of tensors in a file.

    Large elements come first, so that every tensor begins at a multiple of its own.
    """
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def _write(opened: BinaryIO, name: str, info: TensorInfo, chunks: Iterator[memoryview]) -> None:
    written = 0
    for chunk in chunks:
        opened.write(chunk)
        written += len(chunk)
    assert written == info.nbytes, f"{name}: found {written} bytes, expected {info.nbytes}"


BLOCK = 4 << 20  # bytes that one checksum is of
_COPY = 4 << 20  # bytes copied at a time, of tensors that cannot be written from where they lie
_SYNC_EVERY = 32 << 20  # bytes


@dataclass(frozen=True)
class Part:
    """What is to be written.

    Attributes:
        key: its name in the file.
        dtype: the name of its dtype in files.
        shape: of it.
        data: gives it when its turn comes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Tensor]

    @property
    def info(self) -> TensorInfo:
        """What is written."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.info.nbytes


@dataclass(frozen=True)
class Written:
    """Where a part went.

    Attributes:
        offset: byte in the file where it begins.
        checksums: of its blocks, in hexadecimal digits.
    """

    offset: int
    checksums: tuple[str, ...]


def write_shard(path: Path, parts: Sequence[Part], block: int = BLOCK) -> dict[str, Written]:
    """Write a new file, and see it onto the disk.

    Args:
        path: of the file; there must be none.
        parts: in any order; larger elements are written first, so that all are aligned.
        block: bytes that one checksum is of.

    Returns:
        By key, where each part went.

    Raises:
        OSError: the disk is full, say.
    """
    ordered = sorted(parts, key=lambda part: -itemsize(part.dtype))
    header = make_header({part.key: part.info for part in ordered}, {})
    data = len(header)
    written: dict[str, Written] = {}
    with _File(path) as file:
        file.write(memoryview(header))
        for part in ordered:
            blocks = _Blocks(block)
            for chunk in _chunks(part.data(), block):
                file.write(chunk)
                blocks.update(chunk)
            written[part.key] = Written(data, blocks.end())
            data += part.nbytes
            if file.size != data:
                raise ValueError(f"{part.key}: wrote up to byte {file.size}, expected {data}")
    return written


class _File:
    """A file that is written in order, and synced when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0
        self._synced = 0
        self._syncing: threading.Thread | None = None
        self._handle = -1

    def __enter__(self) -> _File:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._path, flags, 0o666)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._syncing is not None:
                self._syncing.join()
            if kind is None:
                os.fsync(self._handle)
        except OSError as error:
            raise _named(error, self._path) from None
        finally:
            os.close(self._handle)

    def write(self, data: memoryview) -> None:
        try:
            while data.nbytes:
                count = os.write(self._handle, data)
                self.size += count
                data = data[count:]
        except OSError as error:
            raise _named(error, self._path) from None
        idle = self._syncing is None or not self._syncing.is_alive()
        if idle and self.size - self._synced >= _SYNC_EVERY:
            self._synced = self.size
            self._syncing = threading.Thread(target=self._sync)
            self._syncing.start()

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # the sync at the end will say so
            os.fdatasync(self._handle)


class _Blocks:
    """The checksums of what is written, block by block."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._digest = xxhash.xxh3_64()
        self._filled = 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: self._block - self._filled]
            self._digest.update(part)
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == self._block:
                self._finish()

    def end(self) -> tuple[str, ...]:
        if self._filled:
            self._finish()
        return tuple(self._done)

    def _finish(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest.reset()
        self._filled = 0


def _chunks(tensor: Tensor, limit: int) -> Iterator[memoryview]:
    """The bytes of a tensor in the order of its elements, at most ``limit`` at a time."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
        data = tensor.view(-1).view(torch.uint8).numpy().data
        yield from (data[at : at + limit] for at in range(0, data.nbytes, limit))
        return
    for part in _small(tensor):
        here = part.contiguous().cpu().resolve_conj().resolve_neg()
        yield here.view(-1).view(torch.uint8).numpy().data


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _small(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor in the order of its elements, none larger than what is copied at a time."""
    if tensor.nbytes <= _COPY or tensor.ndim == 0:
        yield tensor
        return
    rows = max(1, _COPY * tensor.shape[0] // tensor.nbytes)
    if rows > 1 or tensor.ndim == 1:
        yield from torch.split(tensor, rows)
        return
    for row in tensor:
        yield from _small(row)


def _named(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file."""
    return OSError(error.errno, error.strerror, str(path))
