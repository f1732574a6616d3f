"""Plain safetensors files: the header of a stranger, and writing a file front to back.

Tensors follow each other with neither gaps nor overlaps. Source: the safetensors format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.checkpoint.disk.dtypes import NAMES
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.disk.headers import make_header, read_fields
from shardwise.checkpoint.disk.strict import (
    Fields,
    Links,
    check_shape,
    check_text,
    open_file,
    refuse,
)

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
    if dtype not in NAMES:
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
