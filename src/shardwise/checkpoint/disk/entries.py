"""What a checkpoint holds, as values: tensors, the pieces they are made of, plain values.

No torch here.

How dtypes are called in safetensors files, and how large their elements are. No torch here.

Source: the table of dtypes in the safetensors format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.disk.boxes import Box

if TYPE_CHECKING:
    import torch


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
class ModelFacts:
    """What a checkpoint tells of its model, beside its tensors.

    Attributes:
        strategy: how it was sharded, in words; empty if it was not said.
        tied: names of tensors that were another one in the model, with the name of that one.
        config: its ``config.json`` as ``transformers`` reads it; empty if it is none of theirs.
    """

    strategy: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


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
        facts: what else it tells of the model.
        versions: of what wrote it: ``{"shardwise": "0.1.0", "torch": "2.13.0"}``.
    """

    tensors: tuple[TensorEntry, ...]
    values: tuple[Value, ...]
    files: Mapping[str, int]
    block: int
    world_size: int
    mesh: str = ""
    facts: ModelFacts = ModelFacts()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    def section(self, name: str) -> list[TensorEntry]:
        """The tensors of ``model``, ``optimizer`` or ``extra``."""
        return [entry for entry in self.tensors if entry.section == name]


# name in files -> name in torch, bytes per element
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
DTYPE_NAMES = frozenset(_DTYPES)
_BY_TORCH_NAME = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}


def itemsize(name: str) -> int:
    """Bytes per element of a dtype, by its name in files."""
    return _DTYPES[name][1]


def dtype_name(dtype: torch.dtype) -> str:
    """The name that files have for a dtype.

    Raises:
        ValueError: the format has none.
    """
    short = str(dtype).removeprefix("torch.")
    if short not in _BY_TORCH_NAME:
        raise ValueError(f"found dtype {short}, expected one of {sorted(_BY_TORCH_NAME)}")
    return _BY_TORCH_NAME[short]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that has this name in files."""
    import torch

    dtype = getattr(torch, _DTYPES[name][0])
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Origin:
    """What a manifest says of a tensor beside its shape.

    Attributes:
        path: the keys that lead to it.
        placements: how it was cut, in words; empty for a plain tensor.
        mesh: over what, in words; empty for a plain tensor.
    """

    path: StatePath
    placements: str = ""
    mesh: str = ""


def dotted(path: StatePath) -> str:
    """The keys that lead to something, in one string."""
    return ".".join(map(str, path))
