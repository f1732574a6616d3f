"""What a checkpoint tells of a model beside its tensors."""

from __future__ import annotations

import itertools
import json
from typing import Any

from torch import nn

from shardwise.checkpoint.disk.entries import ModelFacts
from shardwise.sharding.reach import groups_of


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
