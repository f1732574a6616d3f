"""``XlaFullyShardedDataParallel``: the same class under PyTorch/XLA's name, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from shardwise.frontends.fsdp import FullyShardedDataParallel
from shardwise.frontends.prepare import ParamInit
from shardwise.frontends.settings import UnitSettings, find_mesh, say_what_has_no_meaning
from shardwise.frontends.strategies import Strategy
from shardwise.frontends.unit import Ignored, auto_wrap
from shardwise.transport.peers import new_group
from shardwise.wrap import Policy

_COMPILED = "a matter of the XLA compiler; there is none here"
_PACKED = "what travels together is for the transport to choose here"
_WHEN = "modules are sharded as they are wrapped, always"
_FLAT = "parameters are never flattened here; each stays a parameter of its own"


class XlaFullyShardedDataParallel(FullyShardedDataParallel):
    """:class:`FullyShardedDataParallel` as PyTorch/XLA's class of this name is called.

    ``state_dict()`` gives this rank's shards, as per-rank checkpoints need;
    ``set_state_dict_type`` changes that. It runs on CPUs and accelerators of torch, not on XLA.

    Args:
        module: the module; its parameters are sharded in place.
        reshard_after_forward: free parameters between forward and backward, or not (ZeRO-2).
        flatten_parameters: parameters are never flattened.
        sync_module_states: give all ranks the parameters and buffers of the first.
        execute_sharding_on_init: modules are sharded as they are wrapped, always.
        optimization_barrier_in_forward: no meaning here, as the next one.
        optimization_barrier_in_backward: see above.
        mark_step_on_finalization: no meaning here.
        disable_reshard_on_root: keep the root's parameters from forward to backward.
        compute_dtype: of parameters and inputs in forward and backward.
        buffer_dtype: of buffers; by default as ``compute_dtype``.
        fp32_reduce_scatter: reduce gradients in float32, whatever is computed in.
        sharding_groups: lists of ranks; this rank shards over the one that it is in. Gradients are
            averaged over that list alone.
        sharding_rank: this rank's place in its list, which is checked.
        sharding_world_size: the length of its list, which is checked.
        shard_param_on_dim_0: parameters are cut along dimension 0, always.
        pin_layout_in_collective_ops: no meaning here.
        coalesce_all_gather_ops: no meaning here: transports choose what to pack.
        auto_wrap_policy: which modules inside become units of their own.
        auto_wrapper_callable: wraps them, in place of this class.
        param_init_fn: as for :class:`FullyShardedDataParallel`.
        reduce_scatter_bucket_size_mb: no meaning here.
        all_gather_bucket_size_mb: no meaning here.

    Raises:
        ValueError: as for :class:`FullyShardedDataParallel`; or this rank is in none, or in several
            of ``sharding_groups``.
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
    ) -> None:
        say_what_has_no_meaning(
            stacklevel=2,
            flatten_parameters=_FLAT if flatten_parameters else None,
            execute_sharding_on_init=None if execute_sharding_on_init else _WHEN,
            optimization_barrier_in_forward=None if optimization_barrier_in_forward else _COMPILED,
            optimization_barrier_in_backward=None
            if optimization_barrier_in_backward
            else _COMPILED,
            mark_step_on_finalization=_COMPILED if mark_step_on_finalization else None,
            pin_layout_in_collective_ops=None if pin_layout_in_collective_ops else _COMPILED,
            coalesce_all_gather_ops=_PACKED if coalesce_all_gather_ops else None,
            reduce_scatter_bucket_size_mb=_PACKED if reduce_scatter_bucket_size_mb else None,
            all_gather_bucket_size_mb=_PACKED if all_gather_bucket_size_mb else None,
        )
        group = process_group or _sharding_group(
            sharding_groups, sharding_rank, sharding_world_size
        )
        strategy = (
            ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
        )
        keeps_root = reshard_after_forward and disable_reshard_on_root
        settings = UnitSettings(
            strategy=strategy,
            mesh=find_mesh(Strategy.of(strategy), group, None),
            reshard_after_forward=None if keeps_root else reshard_after_forward,
            mixed_precision=_mixed_precision(compute_dtype, buffer_dtype, fp32_reduce_scatter),
            cpu_offload=CPUOffload(),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            transport=transport,
        )
        ignored = Ignored.of(module, None, None)
        if auto_wrap_policy is not None:
            nested: dict[str, Any] = {
                "reshard_after_forward": reshard_after_forward,
                "sync_module_states": sync_module_states,
                "disable_reshard_on_root": disable_reshard_on_root,
                "compute_dtype": compute_dtype,
                "buffer_dtype": buffer_dtype,
                "fp32_reduce_scatter": fp32_reduce_scatter,
                "param_init_fn": param_init_fn,
                "process_group": group,
                "transport": transport,
            }
            wrapper = auto_wrapper_callable or type(self)
            auto_wrap(module, auto_wrap_policy, wrapper, nested, None, ignored)
        self.hold(
            module,
            settings,
            ignored,
            param_init_fn,
            sync_module_states,
            StateDictType.LOCAL_STATE_DICT,
        )


def _mixed_precision(
    compute_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None, fp32_reduce: bool
) -> MixedPrecision:
    return MixedPrecision(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32 if fp32_reduce else None,
        buffer_dtype=compute_dtype if buffer_dtype is None else buffer_dtype,
        cast_forward_inputs=True,
    )


def _sharding_group(
    groups: Sequence[Sequence[int]] | None, rank: int | None, world_size: int | None
) -> dist.ProcessGroup | None:
    """The process group of the list of ranks that this one is in."""
    if groups is None:
        return None
    me = dist.get_rank()
    own = [list(group) for group in groups if me in group]
    if len(own) != 1:
        raise ValueError(
            f"sharding_groups: expected rank {me} in one list of ranks, found it in {len(own)} of "
            f"{[list(group) for group in groups]}"
        )
    for name, found, expected in (
        ("sharding_rank", rank, own[0].index(me)),
        ("sharding_world_size", world_size, len(own[0])),
    ):
        if found is not None and found != expected:
            raise ValueError(
                f"{name}: rank {me} expected {expected}, as sharding_groups say, found {found}"
            )
    return new_group(own[0])
