"""The state to be saved, as tensors and values with names; and back.

    {"model": {"a.weight": T}, "optimizer": {"state": {"a.weight": {"exp_avg": T}}}, "extra": ...}

becomes tensors ``model.a.weight`` and ``optimizer.state.a.weight.exp_avg``, each with the path that
leads to it, and values that are JSON.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise._torch import dtensor
from shardwise.checkpoint.disk.dtypes import dtype_name
from shardwise.checkpoint.disk.entries import StatePath, Value
from shardwise.checkpoint.disk.tree import leaves
from shardwise.checkpoint.disk.values import encode


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


@dataclass
class State:
    """What a rank has to save.

    Attributes:
        tensors: by name; the memory is the model's and the optimizer's own.
        origins: of the same tensors.
        values: everything else.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)

    def add(self, section: str, tree: Mapping[str, Any]) -> None:
        """Add ``model``, ``optimizer`` or ``extra``.

        Raises:
            TypeError: something in it can be saved neither as a tensor nor as a plain value.
            ValueError: two things would have the same name, or a tensor is not there.
        """
        for path, leaf in leaves((section,), tree):
            name = ".".join(map(str, path))
            if not name.isprintable():
                raise ValueError(f"{name!r}: expected a name of printable characters")
            if isinstance(leaf, Tensor):
                if name in self.tensors:
                    raise ValueError(f"{name}: two tensors have this name")
                self.tensors[name] = check_tensor(leaf, name)
                self.origins[name] = origin_of(leaf, path)
                if section == "extra" and isinstance(leaf, DTensor):
                    raise TypeError(f"{name}: is a DTensor, expected a plain tensor in extra")
            else:
                encode(leaf, name)  # says so if it cannot be saved, before anything is written
                # A copy, since it may be written when training has gone on.
                self.values.append(Value(path, copy.deepcopy(leaf)))


def check_tensor(tensor: Tensor, name: str) -> Tensor:
    """Check that a tensor can be saved, or loaded into.

    Raises:
        TypeError: it is sparse, of an unknown dtype, or a partial sum.
        ValueError: it is on the meta device.
    """
    if tensor.device.type == "meta":
        raise ValueError(f"{name}: is on the meta device; materialise it first")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{name}: found layout {tensor.layout}, expected a dense tensor")
    try:
        dtype_name(tensor.dtype)
    except ValueError as error:
        raise TypeError(f"{name}: {error}") from None
    if isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements):
        raise TypeError(f"{name}: has placements {tensor.placements}, expected no partial sums")
    held = type(local_of(tensor))
    if held is not Tensor:
        raise TypeError(f"{name}: found a {held.__name__}, expected plain tensors as shards")
    return tensor


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return dtensor.local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def origin_of(tensor: Tensor, path: StatePath) -> Origin:
    """How a tensor is sharded, in words."""
    if not isinstance(tensor, DTensor):
        return Origin(path)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    shape = " ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return Origin(path, " ".join(map(_placement, tensor.placements)), shape)


def _placement(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_") if placement.is_replicate() else str(placement)
