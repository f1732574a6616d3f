"""Safetensors files: how a header is read and made, and how a file is written.

    8 bytes     length of the header, little endian
    header      JSON: dtype, shape, and first and last byte of each tensor, by name
    elements    one tensor after the other, without gaps or overlaps

A header may come from a stranger. It is parsed strictly, and must describe the file exactly.
Nothing is gathered in memory to write a file: bytes go from the tensors to the file, and are hashed
on the way, while the processor still has them in its cache.

Source: the safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, NewFile, open_file, read_exactly
from shardwise.base.strict import (
    Fields,
    check_number,
    check_shape,
    check_text,
    parse,
    refuse,
)
from shardwise.checkpoint.disk.entries import DTYPE_NAMES, StoredPiece, TensorInfo, piece_key
from shardwise.checkpoint.disk.place import Place

#: The longest header, in bytes, that the safetensors library reads.
MAX_HEADER = 100_000_000
#: Metadata that transformers asks for before it loads a file.
PT_METADATA = {"format": "pt"}
#: Number of bytes that one checksum covers.
BLOCK = 4 << 20

Chunks = Callable[[str], Iterator[memoryview]]
"""Called with the name of a tensor, gives its bytes in order."""

_ALIGN = 64  # bytes: elements begin at a cache line
_SMALL = 16 << 10  # bytes
_COPY = 4 << 20  # bytes copied at a time, for tensors that cannot be written from where they are


@dataclass(frozen=True)
class StoredSpan:
    """Where a tensor is in a file.

    Attributes:
        info: its dtype and shape.
        start: byte of the file at which its first element begins.
    """

    info: TensorInfo
    start: int


def read_header(file: Path) -> dict[str, StoredSpan]:
    """Read where every tensor of a file is. Nothing but the header is read.

    Symbolic links are followed, because the cache of Hugging Face consists of them.

    Raises:
        CheckpointError: it is not a safetensors file, or its header does not describe it.
    """
    handle, size = open_file(file, Links.FOLLOW)
    try:
        return read_spans(partial(read_exactly, handle, file=file), size, file)
    finally:
        os.close(handle)


def read_spans(
    read: Callable[[memoryview, int], None], size: int, file: Place
) -> dict[str, StoredSpan]:
    """Read where every tensor of an open file is; see :func:`read_header`.

    Args:
        read: fills memory from a byte of the file on.
        size: size of the file in bytes.
        file: its path, for error messages.

    Raises:
        CheckpointError: it is not a safetensors file, or its header does not describe it.
    """
    data, fields = read_fields(read, size, file)
    places = {
        name: _place(name, entry, f"{file}, {name!r}", data)
        for name, entry in fields.items()
        if name != "__metadata__"
    }
    _check_order(places, data, size, file)
    return places


def read_fields(
    read: Callable[[memoryview, int], None], size: int, file: Place
) -> tuple[int, dict[str, Any]]:
    """Read the header of an open file as JSON. Its entries are not checked.

    Args:
        read: fills memory from a byte of the file on.
        size: size of the file in bytes.
        file: path of the file, for error messages.

    Returns:
        The byte at which the elements begin, and the entries by name.

    Raises:
        CheckpointError: the header is truncated, too long, or not JSON.
    """
    if size < 8:
        refuse(str(file), f"{size} bytes", "the header of a safetensors file")
    prefix = bytearray(8)
    read(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    where = f"{file}, header"
    check_number(length, f"{where}, length", least=2, most=min(MAX_HEADER, max(2, size - 8)))
    text = bytearray(length)
    read(memoryview(text), 8)
    return 8 + length, Fields(parse(text, where, size), where).all()


def _place(name: str, entry: Any, where: str, data: int) -> StoredSpan:
    check_text(name, where)
    fields = Fields(entry, where)
    dtype = fields.text("dtype")
    if dtype not in DTYPE_NAMES:
        refuse(f"{where}, 'dtype'", dtype, f"one of {', '.join(sorted(DTYPE_NAMES))}")
    info = TensorInfo(dtype, fields.numbers("shape"))
    check_shape(info.shape, info.itemsize, where)
    offsets = fields.numbers("data_offsets", 2)
    if len(offsets) != 2 or offsets[1] - offsets[0] != info.nbytes:
        refuse(f"{where}, 'data_offsets'", list(offsets), f"two, {info.nbytes} bytes apart")
    return StoredSpan(info, data + offsets[0])


def _check_order(places: Mapping[str, StoredSpan], data: int, size: int, file: Place) -> None:
    """Check that tensors follow each other from the header to the end of the file."""
    at = data
    for name, place in sorted(
        places.items(), key=lambda item: (item[1].start, item[1].info.nbytes)
    ):
        if place.start != at:
            refuse(f"{file}, {name!r}, first byte", place.start - data, str(at - data))
        at += place.info.nbytes
    if at != size:
        refuse(str(file), f"{size:,} bytes", f"{at:,}, as its header says")


def lay_out(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Lay out a file: large elements come first, so that all offsets are multiples of their sizes.

    Args:
        tensors: the tensors of the file, in any order.
        metadata: the header's ``__metadata__``; left out if empty.

    Returns:
        The bytes that precede the elements, and the byte of the file at which each tensor begins,
        in the order in which they are stored.

    Raises:
        CheckpointError: there are more tensors than fit in a header.
    """
    fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = {}, 0
    for name, info in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        starts[name], end = end, end + info.nbytes
        fields[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"found {len(tensors):,} tensors, more than fit in the header of one safetensors file; "
            "write more files (--max-shard-size)"
        )
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def write_safetensors(
    file: Place,
    tensors: Mapping[str, TensorInfo],
    chunks: Chunks,
    metadata: Mapping[str, str] = PT_METADATA,
) -> dict[str, int]:
    """Write a new file, and wait until it is on the disk.

    Args:
        file: path of the file, which must not exist, or its name in an object store.
        tensors: the tensors to write, in any order.
        chunks: called with the name of a tensor, gives its bytes in order.
        metadata: the header's ``__metadata__``.

    Returns:
        For each tensor, the byte of the file at which it begins.

    Raises:
        OSError: the file exists, or cannot be written.
        ValueError: a tensor has more or fewer bytes than ``tensors`` says.
    """
    header, offsets = lay_out(tensors, metadata)

    def content() -> Iterator[bytes | memoryview]:
        yield header
        for name in offsets:
            written, expected = 0, tensors[name].nbytes
            for chunk in chunks(name):
                yield chunk
                written += chunk.nbytes
            if written != expected:
                raise ValueError(f"{name}: wrote {written} bytes, expected {expected}")

    if not isinstance(file, Path):
        file.write(content(), len(header) + sum(info.nbytes for info in tensors.values()))
        return offsets
    with NewFile(file) as new:
        for part in content():
            new.write(part)
    return offsets


@dataclass(frozen=True)
class PieceData:
    """A piece of a tensor, to be written.

    Attributes:
        fqn: name of the tensor.
        info: dtype and shape of the full tensor.
        box: which part of it the piece is.
        load: returns the piece when it is about to be written.
    """

    fqn: str
    info: TensorInfo
    box: Box
    load: Callable[[], Tensor]

    @property
    def key(self) -> str:
        """Its name in the file."""
        return piece_key(self.fqn, self.info.shape, self.box)

    @property
    def own_info(self) -> TensorInfo:
        """Its dtype and shape."""
        return TensorInfo(self.info.dtype, self.box.sizes)


def write_shard(path: Place, pieces: Sequence[PieceData], block: int = BLOCK) -> list[StoredPiece]:
    """Write a new file with checksums of pieces of tensors, and wait until it is on the disk.

    Args:
        path: path of the file, which must not exist, or its name in an object store.
        pieces: what to write, in any order, each with a key of its own.
        block: number of bytes that one checksum covers.

    Returns:
        Where each piece is, in the order of ``pieces``.

    Raises:
        OSError: the file exists, or cannot be written.
        ValueError: a tensor does not have the size of its piece.
    """
    by_key = {each.key: each for each in pieces}
    assert len(by_key) == len(pieces), "every piece has a key of its own"
    checksums: dict[str, tuple[str, ...]] = {}

    def hashed(key: str) -> Iterator[memoryview]:
        digest, filled, done = xxhash.xxh3_64(), 0, []
        for chunk in _chunks(by_key[key].load(), block):
            yield chunk
            left = chunk
            while left.nbytes:  # chunks have any size
                part, left = left[: block - filled], left[block - filled :]
                digest.update(part)
                filled += part.nbytes
                if filled == block:
                    done.append(digest.hexdigest())
                    digest, filled = xxhash.xxh3_64(), 0
        checksums[key] = (*done, digest.hexdigest()) if filled else tuple(done)

    infos = {key: each.own_info for key, each in by_key.items()}
    if not isinstance(path, Path):  # where small ones side by side are read with one request
        infos = dict(sorted(infos.items(), key=lambda item: item[1].nbytes > _SMALL))
    offsets = write_safetensors(path, infos, hashed, metadata={})
    return [
        StoredPiece(path.name, offsets[key], each.box, checksums[key])
        for key, each in by_key.items()
    ]


def digest_of(tensor: Tensor) -> str:
    """A digest of a tensor's elements, shape and dtype, for comparing it between ranks."""
    digest = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for chunk in _chunks(tensor, BLOCK):
        digest.update(chunk)
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a tensor that shares its memory.

    One of a single element counts as contiguous with any strides, so ``view`` is not enough.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_lazy(tensor: Tensor) -> bool:
    """Whether memory has other elements than the tensor: it is conjugated or negated on reading."""
    return tensor.is_conj() or tensor.is_neg()


def _chunks(tensor: Tensor, limit: int) -> Iterator[memoryview]:
    """The bytes of a tensor in the order of its elements, at most ``limit`` at a time."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not is_lazy(tensor):
        data = as_bytes(tensor).numpy().data
        yield from (data[at : at + limit] for at in range(0, data.nbytes, limit))
        return
    for part in _small_parts(tensor):
        here = part.contiguous().cpu().resolve_conj().resolve_neg()
        yield as_bytes(here).numpy().data


def _small_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor in the order of its elements, each small enough to copy."""
    if tensor.nbytes <= _COPY or tensor.ndim == 0:
        yield tensor
        return
    rows = max(1, _COPY * tensor.shape[0] // tensor.nbytes)
    if rows > 1 or tensor.ndim == 1:
        yield from torch.split(tensor, rows)
        return
    for row in tensor:
        yield from _small_parts(row)
