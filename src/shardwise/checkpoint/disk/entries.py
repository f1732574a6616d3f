"""What a checkpoint holds, as values: tensors, the pieces they are made of, plain values.

No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.disk.boxes import Box
from shardwise.checkpoint.disk.dtypes import itemsize

#: What the state of a training is made of; the first key of every path.
SECTIONS = ("model", "optimizer", "extra")

PathKey = str | int
StatePath = tuple[PathKey, ...]


def shard_name(rank: int, world_size: int) -> str:
    """The file that a rank writes."""
    return f"shard-{rank:05}-of-{world_size:05}.safetensors"


@dataclass(frozen=True)
class TensorInfo:
    """What a tensor is.

    Attributes:
        dtype: its name in files: ``"F32"``.
        shape: of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, in one file.

    Attributes:
        file: the file's name, inside the folder.
        offset: byte in the file where the piece begins.
        box: which part of the tensor it is, in elements.
        checksums: one per block of the piece, the last block being what is left: 16 hexadecimal
            digits each.
    """

    file: str
    offset: int
    box: Box
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor.

    Attributes:
        path: the keys that lead to it in the saved state: ``("model", "layers.0.weight")``,
            ``("optimizer", "state", "layers.0.weight", "exp_avg")``, ``("extra", ...)``.
        shape: of the whole tensor.
        dtype: its name in files: ``"F32"``.
        placements: how the mesh cut it, ``"Shard(0)"``; empty for a plain tensor.
        mesh: the mesh, ``"replicate=2 shard=4"``; empty for a plain tensor.
        pieces: what it is made of; none if it has no elements.
    """

    path: StatePath
    shape: tuple[int, ...]
    dtype: str
    placements: str
    mesh: str
    pieces: tuple[Piece, ...]

    @property
    def fqn(self) -> str:
        """The path in one string: unique in a checkpoint."""
        return ".".join(map(str, self.path))

    @property
    def section(self) -> str:
        """``model``, ``optimizer`` or ``extra``."""
        return str(self.path[0])

    @property
    def name(self) -> str:
        """The path without the section: for a parameter, its name in the model."""
        return ".".join(map(str, self.path[1:]))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return TensorInfo(self.dtype, self.shape).nbytes

    def key(self, piece: Piece) -> str:
        """What a piece is called in its file."""
        if piece.box.sizes == self.shape:
            return self.fqn
        spans = zip(piece.box.offsets, piece.box.sizes, strict=True)
        return f"{self.fqn}[{','.join(f'{a}:{a + n}' for a, n in spans)}]"


@dataclass(frozen=True)
class Value:
    """One plain value.

    Attributes:
        path: the keys that lead to it in the saved state.
        value: see :mod:`.values` for what it can be.
    """

    path: StatePath
    value: Any


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tensors: in the order of the state.
        values: everything that is not a tensor: options of the optimizer, step, random states.
        files: the size of each file in bytes.
        block: bytes that one checksum is of.
        world_size: the number of ranks that saved.
        mesh: the mesh of the model's parameters, ``"shard=4"``; empty if they are plain.
        strategy: how they were sharded, in words; empty if it was not said.
        versions: of what wrote it: ``{"shardwise": "0.1.0", "torch": "2.13.0"}``.
    """

    tensors: tuple[TensorEntry, ...]
    values: tuple[Value, ...]
    files: Mapping[str, int]
    block: int
    world_size: int
    mesh: str = ""
    strategy: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def section(self, name: str) -> list[TensorEntry]:
        """The tensors of ``model``, ``optimizer`` or ``extra``."""
        return [entry for entry in self.tensors if entry.section == name]
