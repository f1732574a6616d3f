"""``XlaFullyShardedDataParallel``: the wrapper with the name and arguments of PyTorch/XLA's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from shardwise.base.arguments import check_arguments
from shardwise.frontends.fsdp import FullyShardedDataParallel
from shardwise.frontends.settings import UnitSettings, WithoutEffect, find_mesh, warn_without_effect
from shardwise.frontends.strategies import Strategy
from shardwise.frontends.unit import AutoWrap, Ignored, ParamInit
from shardwise.transport.peers import new_group
from shardwise.transport.wire import Wire
from shardwise.wrap import Policy

_COMPILED = "only matters to the XLA compiler, which is not used here"
_PACKED = "the transport decides how to pack tensors into messages"

_WITHOUT_EFFECT: WithoutEffect = {
    "flatten_parameters": ((False, None), "parameters are never flattened"),
    "execute_sharding_on_init": ((True,), "modules are always sharded when they are wrapped"),
    "optimization_barrier_in_forward": ((True,), _COMPILED),
    "optimization_barrier_in_backward": ((True,), _COMPILED),
    "mark_step_on_finalization": ((False, None), _COMPILED),
    "shard_param_on_dim_0": ((True, False), "parameters are sharded along dimension 0 anyway"),
    "pin_layout_in_collective_ops": ((True,), _COMPILED),
    "coalesce_all_gather_ops": ((False, None), _PACKED),
    "reduce_scatter_bucket_size_mb": ((0, None), _PACKED),
    "all_gather_bucket_size_mb": ((0, None), _PACKED),
}

#: The arguments that modules wrapped by ``auto_wrap_policy`` get as they are.
_PASSED_ON = (
    "reshard_after_forward",
    "sync_module_states",
    "disable_reshard_on_root",
    "compute_dtype",
    "buffer_dtype",
    "fp32_reduce_scatter",
    "param_init_fn",
    "transport",
    "wire",
)


class XlaFullyShardedDataParallel(FullyShardedDataParallel):
    """A module whose parameters are sharded over ranks, with the API of PyTorch/XLA's FSDP.

    ``state_dict()`` returns this rank's shards, for checkpoints with a file per rank;
    ``set_state_dict_type`` changes that. Runs on CPUs and torch's accelerators, not on XLA devices.

    Source: ``torch_xla.distributed.fsdp.XlaFullyShardedDataParallel``.

    Args:
        module: the module; its parameters are sharded in place.
        reshard_after_forward: free parameters between forward and backward; ``False`` is ZeRO-2.
        flatten_parameters: without effect: parameters are never flattened.
        sync_module_states: broadcast parameters and buffers from the first rank.
        execute_sharding_on_init: without effect: modules are sharded when they are wrapped.
        optimization_barrier_in_forward: without effect.
        optimization_barrier_in_backward: without effect.
        mark_step_on_finalization: without effect.
        disable_reshard_on_root: keep the root's parameters from forward to backward.
        compute_dtype: dtype of parameters and inputs in forward and backward.
        buffer_dtype: dtype of buffers; ``compute_dtype`` by default.
        fp32_reduce_scatter: reduce gradients in float32, whatever ``compute_dtype`` is.
        sharding_groups: lists of ranks. This rank shards, and averages gradients, over the list
            that it is in.
        sharding_rank: the position of this rank in its list, or among all ranks, to be checked.
        sharding_world_size: the length of that list, or their number, to be checked.
        shard_param_on_dim_0: without effect: parameters are sharded along dimension 0.
        pin_layout_in_collective_ops: without effect.
        coalesce_all_gather_ops: without effect: transports decide what to pack.
        auto_wrap_policy: the modules inside that become units of their own.
        auto_wrapper_callable: wraps them, in place of this class.
        param_init_fn: as for :class:`FullyShardedDataParallel`.
        reduce_scatter_bucket_size_mb: without effect.
        all_gather_bucket_size_mb: without effect.
        process_group: the ranks, in place of ``sharding_groups``.
        transport: as for :class:`FullyShardedDataParallel`.
        wire: as there.

    Raises:
        ValueError: as for :class:`FullyShardedDataParallel`; or this rank is in none or several of
            ``sharding_groups``, or there is a ``process_group``, too.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        sync_module_states: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        mark_step_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: ParamInit | None = None,
        reduce_scatter_bucket_size_mb: int | None = 0,
        all_gather_bucket_size_mb: int | None = 0,
        *,
        process_group: dist.ProcessGroup | None = None,
        transport: str | None = None,
        wire: Wire | Mapping[str, Wire] | None = None,
    ) -> None:
        check_arguments(XlaFullyShardedDataParallel.__init__, locals())
        given = dict(locals())  # arguments by name, as the tables below list them
        warn_without_effect(given, _WITHOUT_EFFECT, stacklevel=2)
        group = _group_of_this_rank(
            process_group, sharding_groups, sharding_rank, sharding_world_size
        )
        strategy = (
            ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
        )
        keeps_root = reshard_after_forward and disable_reshard_on_root
        inner = {name: given[name] for name in _PASSED_ON} | {"process_group": group}
        self.wrap(
            module,
            UnitSettings(
                strategy=strategy,
                mesh=find_mesh(Strategy.of(strategy), group, None),
                reshard_after_forward=None if keeps_root else reshard_after_forward,
                mixed_precision=MixedPrecision(
                    param_dtype=compute_dtype,
                    reduce_dtype=torch.float32 if fp32_reduce_scatter else None,
                    buffer_dtype=compute_dtype if buffer_dtype is None else buffer_dtype,
                    cast_forward_inputs=True,
                ),
                transport=transport,
                wire=wire,
            ),
            ignored=Ignored.of(module, None, None),
            auto_wrap=AutoWrap(auto_wrap_policy, auto_wrapper_callable or type(self), inner),
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
            state_dict_type=StateDictType.LOCAL_STATE_DICT,
        )


def _group_of_this_rank(
    group: dist.ProcessGroup | None,
    groups: Sequence[Sequence[int]] | None,
    rank: int | None,
    world_size: int | None,
) -> dist.ProcessGroup | None:
    """The process group that was passed, or that of the list that this rank is in."""
    if groups is None and rank is None and world_size is None:
        return group
    me = dist.get_rank()
    if groups is None:
        ranks, what = dist.get_process_group_ranks(group), "process_group"
    elif group is not None:
        raise ValueError(
            f"found process_group and sharding_groups on rank {me}, expected one of the two"
        )
    else:
        own = [list(each) for each in groups if me in each]
        if len(own) != 1:
            raise ValueError(
                f"sharding_groups: found rank {me} in {len(own)} of the lists "
                f"{[list(each) for each in groups]}, expected it in one"
            )
        ranks, what = own[0], "sharding_groups"
    for name, found, expected in (
        ("sharding_rank", rank, ranks.index(me)),
        ("sharding_world_size", world_size, len(ranks)),
    ):
        if found is not None and found != expected:
            raise ValueError(
                f"{name}: found {found} on rank {me}, expected {expected}, as in {what}"
            )
    return group if groups is None else new_group(ranks)
