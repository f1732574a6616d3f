"""How a model is sharded, in words, for people who look at a checkpoint."""

from __future__ import annotations

from torch import nn

from shardwise.sharding.reach import groups_of


def strategy_of(model: nn.Module) -> str:
    """``full``, ``grad-op``, ``hybrid``, ...: the names that the command line knows.

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
