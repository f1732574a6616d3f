"""Writing files of ``torch.save`` whose tensors do not fit in memory.

Torch lays out the file with fake tensors, which leaves holes where their bytes belong. The holes
are then filled a part of a tensor at a time, and the checksums of the archive are corrected.
"""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise._torch import fake
from shardwise.base.units import one_line
from shardwise.checkpoint.disk.entries import TensorInfo, torch_dtype
from shardwise.checkpoint.disk.safetensors import Chunks
from shardwise.checkpoint.disk.values import held_in, replaced_in
from shardwise.checkpoint.formats.archive import write_checksums
from shardwise.checkpoint.formats.torchfile import StoredTensor, read_tree


@dataclass(frozen=True)
class Placeholder:
    """Stands for a tensor in a tree that :func:`write_tree` writes.

    Placeholders with the same name become one tensor that shares its memory.

    Attributes:
        name: the name under which its bytes are asked for.
        info: dtype and shape of the tensor.
    """

    name: str
    info: TensorInfo


def write_tree(path: Path, tree: Any, chunks: Chunks) -> None:
    """Write what ``torch.save`` would write, without holding the tensors in memory.

    Args:
        path: path of the file, which must not exist.
        tree: plain values, with a :class:`Placeholder` for every tensor.
        chunks: called with the name of a placeholder, gives the bytes of its tensor in order.

    Raises:
        OSError: the file cannot be written.
    """
    made: dict[str, torch.Tensor] = {}  # fake ones, which have no memory

    def tensor_for(value: Any) -> Any:
        if not isinstance(value, Placeholder):
            return value
        if value.name not in made:
            with fake.FakeTensorMode():
                dtype = torch_dtype(value.info.dtype)
                made[value.name] = torch.empty(value.info.shape, dtype=dtype)
        return made[value.name]

    with torch.serialization.skip_data(materialize_fake_tensors=True):
        save(replaced_in(tree, tensor_for), path)
    pairs = zip(held_in(tree), held_in(read_tree(path)), strict=True)
    places: dict[str, StoredTensor] = {
        hole.name: stored for hole, stored in pairs if isinstance(hole, Placeholder)
    }
    sums: dict[int, int] = {}
    with path.open("r+b") as file:
        for name, stored in places.items():
            file.seek(stored.start)
            crc = 0
            for chunk in chunks(name):
                file.write(chunk)
                crc = zlib.crc32(chunk, crc)
            assert file.tell() == stored.start + stored.info.nbytes, (
                f"{name}: wrote another number of bytes than it has"
            )
            sums[stored.start] = crc
        write_checksums(file, sums)
        file.flush()
        os.fsync(file.fileno())


def save(value: Any, file: Path | BinaryIO) -> None:
    """Write a value with ``torch.save``, and report a full disk as an ``OSError``.

    Torch reports it as a failed assertion of its own.

    Args:
        value: what to write.
        file: path of the file, or an open one.

    Raises:
        OSError: it cannot be written.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        name = str(file if isinstance(file, Path) else file.name)
        message = f"torch.save could not write it; is the disk full? ({one_line(error, 80)})"
        raise OSError(errno.EIO, message, name) from error
