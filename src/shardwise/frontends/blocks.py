"""Shard a model as trainings do: every block, then the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from shardwise.frontends.activation import batch_norms
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.sharding.state import gather_in_order, groups_of
from shardwise.transport.wire import Wire


def shard_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    precision: MixedPrecisionPolicy,
    placement: Callable[[nn.Parameter], Shard | None] | None = None,
    transport: str | None = None,
    offload_policy: OffloadPolicy | None = None,
    wire: Wire | Mapping[str, Wire] | None = None,
) -> None:
    """Shard every block, then the rest, so that each block is gathered by itself.

    Batch norm is kept and computes in float32 whatever the rest does, as its statistics are.

    Args:
        model: on the meta device, or the same on every rank.
        blocks: modules of it that are to be gathered one at a time, inner ones first.
        mesh: as for ``fully_shard``.
        reshard_after_forward: of the blocks, as for ``fully_shard``. The rest stays unsharded.
        precision: dtypes of forward, backward and reduction.
        placement: along which dimension a parameter is cut; by default the first.
        transport: as for ``fully_shard``.
        offload_policy: as for ``fully_shard``.
        wire: as for ``fully_shard``.
    """
    # Inputs stay as they are: batch norm takes bfloat16 beside float32 parameters.
    full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    taken: set[nn.Module] = set()
    for module in (*blocks, model):
        # The root's own parameters (embedding, head) are needed at both ends of the forward.
        reshard = False if module is model else reshard_after_forward
        groups: list[tuple[nn.Module | list[nn.Module], MixedPrecisionPolicy]] = []
        norms: list[nn.Module] = [norm for norm in batch_norms(module) if norm not in taken]
        if norms and precision.param_dtype not in (None, torch.float32):
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
                offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
                wire=wire,
            )
    if any(group.mesh.shard.overlaps_compute for group in groups_of(model)):
        # Trainings write to parameters between steps only, so gathering early is safe.
        gather_in_order(model)


def store_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep floating-point parameters in a dtype, except those of batch norms, and adapters.

    Buffers stay as they are.

    Args:
        model: not sharded yet; parameters that are tied stay tied. The configuration of a model of
            ``transformers`` names the dtype from then on.
        dtype: of parameters, and so of their gradients and of the optimizer's state.
    """
    left = {p for norm in batch_norms(model) for p in norm.parameters()}
    trained = {p for p in model.parameters() if p.requires_grad}
    if len(trained) < len(list(model.parameters())):
        left |= trained  # adapters on a frozen base stay in float32, as peft has them
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter not in left:
            parameter.data = parameter.data.to(dtype)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.dtype = dtype
