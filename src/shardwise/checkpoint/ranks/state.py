"""The state to be saved, as tensors and values with names; and back.

    {"model": {"a.weight": T}, "optimizer": {"state": {"a.weight": {"exp_avg": T}}}, "extra": ...}

becomes tensors ``model.a.weight`` and ``optimizer.state.a.weight.exp_avg``, each with the path that
leads to it, and values that are JSON.

What a checkpoint tells of a model beside its tensors.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise._torch import dtensor
from shardwise.checkpoint.disk.entries import (
    ModelFacts,
    Origin,
    StatePath,
    Value,
    dotted,
    dtype_name,
)
from shardwise.checkpoint.disk.values import encode, leaves
from shardwise.checkpoint.ranks.optimizer import optimizer_tree, parameter_names
from shardwise.sharding.state import groups_of
from shardwise.sharding.state_dict import sharded_state_dicts


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
            name = dotted(path)
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


def facts_of(model: nn.Module) -> ModelFacts:
    """How it is sharded, which of its tensors are one, and what transformers knows it by."""
    tied = {name: names[0] for name, names in ties(model).items() if name != names[0]}
    return ModelFacts(strategy_of(model), tied, _config_of(model))


def ties(model: nn.Module) -> dict[str, list[str]]:
    """The names of every tensor that has several, by each of them, in the order of the model."""
    names: dict[int, list[str]] = {}
    for name, tensor in itertools.chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _config_of(model: nn.Module) -> dict[str, Any]:
    """The ``config.json`` of a model of transformers, or of what looks like one."""
    config = getattr(model, "config", None)
    try:
        said = json.loads(config.to_json_string())  # type: ignore[union-attr]
        json.dumps(said, allow_nan=False)
    except Exception:  # whatever it is, a checkpoint does without
        return {}
    named = isinstance(said, dict) and isinstance(said.get("model_type"), str)
    return said if named else {}


def strategy_of(model: nn.Module) -> str:
    """``full``, ``grad-op``, ``hybrid``, ...: the names that the command line knows.

    ZeRO-1 holds parameters as ZeRO-2 does, ``grad-op``: it differs by what a step does with
    gradients, of which the model knows nothing.

    Returns:
        Empty, where Shardwise does not shard the model.
    """
    groups = list(groups_of(model))
    if not groups:
        return ""
    # Groups that end a forward may be kept; a model reshards if any of its groups does.
    frees = any(group.options.reshard_after_forward for group in groups)
    mesh = groups[0].mesh
    if not mesh.shards or mesh.shard.world_size == 1:
        return "no-shard"
    if mesh.replicate is not None:
        return "hybrid" if frees else "hybrid-zero2"
    return "full" if frees else "grad-op"


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any] | None
) -> State:
    """What this rank has to save; the memory is still the model's and the optimizer's own.

    Raises:
        TypeError: something is neither a tensor nor a plain value.
        ValueError: something is on the meta device, or has the name of another.
    """
    state = State()
    with sharded_state_dicts(model):
        saved = get_model_state_dict(model)
    state.add("model", saved)
    if optimizer is not None:
        state.add("optimizer", optimizer_tree(optimizer, parameter_names(model, saved)))
    state.add("extra", extra or {})
    return state
