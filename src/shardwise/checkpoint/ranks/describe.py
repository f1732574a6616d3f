"""How a model is sharded, in words, for people who look at a checkpoint."""

from __future__ import annotations

from torch import nn

from shardwise.sharding.hooks import state_of


def strategy_of(model: nn.Module) -> str:
    """``full``, ``grad-op``, ``hybrid``, ...: the names that the command line knows.

    ZeRO-1 holds parameters as ZeRO-2 does, ``grad-op``: it differs by what a step does with
    gradients, of which the model knows nothing.

    Returns:
        Empty, where Shardwise does not shard the model.
    """
    states = [state for state in map(state_of, model.modules()) if state is not None]
    groups = [group for state in states for group in state.groups]
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
