"""TODO."""

from __future__ import annotations

import errno
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise._torch import dtensor
from shardwise.checkpoint.disk.entries import TensorInfo, torch_dtype
from shardwise.checkpoint.formats.torchfile import StoredTensor, read_tree

_LOCAL_HEADER = struct.Struct("<26xHH")  # lengths of the name and of what follows it


_CENTRAL = struct.Struct("<28xHHH12x")  # lengths of the name, what follows, and a comment


_CENTRAL_CRC = 16


_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True)
class Placeholder:
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
        tree: plain values, and a :class:`Placeholder` for every tensor.
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
    if isinstance(value, Placeholder):
        if value.name not in holes:
            with dtensor.fake_tensors():
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
    if isinstance(tree, Placeholder):
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
