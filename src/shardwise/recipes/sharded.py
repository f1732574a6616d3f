"""A model becomes shards, as a configuration says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardwise import FSDPModule, MixedPrecisionPolicy, fully_shard
from shardwise.recipes.config import Precision, ShardingConfig
from shardwise.recipes.running_stats import batch_norms
from shardwise.recipes.task import Place

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    config: ShardingConfig,
    place: Place,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
) -> FSDPModule:
    """Shard every unit, then the rest.

    Batch norm computes in float32 whatever the rest computes in, as its statistics are.

    Args:
        model: on the meta device, or the same on every rank.
        units: modules of it that are to be gathered one at a time, inner ones first.
        config: dtypes and transport.
        place: mesh and strategy.
        placement: along which dimension a parameter is cut; by default the first.

    Returns:
        ``model``.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype], reduce_dtype=DTYPES[config.reduce_dtype]
    )
    # Inputs stay as they are: batch norm takes bfloat16 beside float32 parameters.
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    transport = None if config.transport is None else config.transport.value
    mesh = place.plan.sharding_mesh(place.mesh)
    taken: set[nn.Module] = set()
    for module in (*units, model):
        # The root's own parameters (embedding, head) are needed at both ends of the forward.
        reshard = place.plan.reshard_after_forward and module is not model
        groups: list[tuple[nn.Module | list[nn.Module], MixedPrecisionPolicy]] = []
        norms: list[nn.Module] = [norm for norm in batch_norms(module) if norm not in taken]
        if norms and config.param_dtype is not Precision.FP32:
            taken.update(norms)
            groups.append((norms, full))
        for part, policy in (*groups, (module, precision)):
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard,
                shard_placement_fn=placement,
                mp_policy=policy,
                transport=transport,
            )
    assert isinstance(model, FSDPModule)
    return model


def shard_bytes(model: nn.Module) -> int:
    """Bytes of parameters that this rank keeps."""
    locals_ = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(t.numel() * t.element_size() for t in locals_)


def transport_name(model: nn.Module) -> str:
    """What moves bytes along each dimension of the mesh, outermost first."""
    state = fully_shard.state(model)  # type: ignore[attr-defined]
    for group in state.groups if state is not None else []:
        outer = group.mesh.replicate
        return group.mesh.shard.name if outer is None else f"{outer.name}/{group.mesh.shard.name}"
    return "none"
