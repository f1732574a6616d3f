"""The values that a checkpoint is described by: tensors, their pieces, plain values, dtypes.

Every value here is immutable, and torch is not imported, so that ``shardwise checkpoint list``
starts at once. Names and sizes of dtypes are those of the safetensors format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.base.boxes import Box

if TYPE_CHECKING:
    import torch

#: The file that makes a folder a checkpoint of Shardwise.
MANIFEST = "manifest.json"
#: The parts of a training state; the first key of every path.
SECTIONS = ("model", "optimizer", "extra")

PathKey = str | int
#: The keys that lead to a tensor or value in the saved state: ``("model", "layers.0.weight")``.
StatePath = tuple[PathKey, ...]

# name in safetensors files -> name in torch, bytes per element
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
    """Bytes per element of a dtype, given its safetensors name."""
    return _DTYPES[name][1]


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype: ``"F32"`` for ``torch.float32``.

    Raises:
        ValueError: the format has no such dtype.
    """
    short = str(dtype).removeprefix("torch.")
    if short not in _BY_TORCH_NAME:
        raise ValueError(f"found dtype {short}, expected one of {sorted(_BY_TORCH_NAME)}")
    return _BY_TORCH_NAME[short]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype with a safetensors name: ``torch.float32`` for ``"F32"``."""
    import torch

    dtype = getattr(torch, _DTYPES[name][0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def dotted(path: StatePath) -> str:
    """A path as one string: ``"model.layers.0.weight"``."""
    return ".".join(map(str, path))


def shard_name(rank: int, world_size: int) -> str:
    """The name of the file that a rank writes: ``shard-00000-of-00002.safetensors``."""
    return f"shard-{rank:05}-of-{world_size:05}.safetensors"


def piece_key(fqn: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a piece of a tensor in its safetensors file.

    That is the tensor's name if the piece is the full tensor, else the name and the indices:
    ``"model.weight[0:2,0:5]"``.
    """
    if box.sizes == shape:
        return fqn
    return f"{fqn}[{box.indices}]"


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and shape of a full tensor.

    Attributes:
        dtype: safetensors name of the dtype, ``"F32"``.
        shape: shape of the full tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor, stored in one file.

    Attributes:
        file: name of the file, inside the checkpoint's folder.
        offset: byte of the file at which the piece begins.
        box: which part of the tensor it is.
        checksums: one checksum per block of the piece, 16 hexadecimal digits each. The last block
            may be shorter than the others.
    """

    file: str
    offset: int
    box: Box
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a manifest.

    Attributes:
        path: the keys that lead to it in the saved state: ``("model", "layers.0.weight")``,
            ``("optimizer", "state", "layers.0.weight", "exp_avg")``, ``("extra", ...)``.
        shape: shape of the full tensor.
        dtype: safetensors name of the dtype, ``"F32"``.
        placements: how it was sharded when it was saved, ``"Shard(0)"``; empty for a plain tensor.
        mesh: the device mesh, ``"replicate=2 shard=4"``; empty for a plain tensor.
        pieces: the pieces that it consists of; none if it has no elements.
    """

    path: StatePath
    shape: tuple[int, ...]
    dtype: str
    placements: str
    mesh: str
    pieces: Sequence[StoredPiece]

    @property
    def fqn(self) -> str:
        """The path as one string, which is unique in a checkpoint."""
        return dotted(self.path)

    @property
    def section(self) -> str:
        """``model``, ``optimizer`` or ``extra``."""
        return str(self.path[0])

    @property
    def name(self) -> str:
        """The path without its section: for a parameter, its name in the model."""
        return dotted(self.path[1:])

    @property
    def info(self) -> TensorInfo:
        """Its dtype and shape."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return self.info.nbytes

    def key(self, piece: StoredPiece) -> str:
        """The name of a piece in its safetensors file; see :func:`piece_key`."""
        return piece_key(self.fqn, self.shape, piece.box)


@dataclass(frozen=True)
class Value:
    """A plain value in a manifest.

    Attributes:
        path: the keys that lead to it in the saved state.
        value: anything that :func:`.values.encode` accepts.
    """

    path: StatePath
    value: Any


@dataclass(frozen=True)
class Origin:
    """Where a saved tensor was in the state, and how it was sharded.

    Attributes:
        path: the keys that lead to it in the state.
        placements: how it was sharded, ``"Shard(0)"``; empty for a plain tensor.
        mesh: the device mesh, ``"shard=4"``; empty for a plain tensor.
    """

    path: StatePath
    placements: str = ""
    mesh: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """What a checkpoint records about its model beside the tensors.

    Attributes:
        strategy: the sharding strategy, as the command line names it; empty if unknown.
        tied: for each tied tensor, the name of the tensor that it is tied to.
        config: the model's ``config.json`` in the form of ``transformers``; empty if it has none.
    """

    strategy: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        tensors: all tensors, in the order of the state.
        values: everything that is not a tensor: optimizer options, step, random states.
        files: size in bytes of each file, by name.
        block: number of bytes that one checksum covers.
        world_size: number of ranks that saved it.
        mesh: the device mesh of the model's parameters, ``"shard=4"``; empty if they are plain.
        facts: what else is recorded about the model.
        versions: versions of the writers: ``{"shardwise": "0.1.0", "torch": "2.13.0"}``.
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
        """Total bytes of all files."""
        return sum(self.files.values())

    def section(self, name: str) -> list[TensorEntry]:
        """The tensors of one section: ``model``, ``optimizer`` or ``extra``."""
        return [entry for entry in self.tensors if entry.section == name]
