"""Fully Sharded Data Parallel for PyTorch that people can see into, predict and trust."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )

    from shardwise import wrap
    from shardwise._torch.fsdp import DataParallelMeshDims
    from shardwise.compat.patch import patch_torch
    from shardwise.errors import PeerLostError, RanksDivergedError, ShardwiseError
    from shardwise.frontends.activation import checkpoint_module
    from shardwise.frontends.fsdp import FullyShardedDataParallel
    from shardwise.frontends.xla import XlaFullyShardedDataParallel
    from shardwise.inspect.api import inspect
    from shardwise.sharding.api import fully_shard
    from shardwise.sharding.device_mesh import init_mesh
    from shardwise.sharding.grad import clip_grad_norm_
    from shardwise.sharding.init import materialize
    from shardwise.sharding.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerLostError",
    "RanksDivergedError",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "ShardwiseError",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "clip_grad_norm_",
    "fully_shard",
    "init_mesh",
    "inspect",
    "materialize",
    "patch_torch",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "wrap",
]

# Importing torch takes seconds, and the command line answers `--help` without it: names are
# fetched when they are first used.
_HOME = {
    "BackwardPrefetch": "torch.distributed.fsdp",
    "CPUOffload": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "shardwise._torch.fsdp",
    "FSDPModule": "shardwise.sharding.module",
    "FullOptimStateDictConfig": "torch.distributed.fsdp",
    "FullStateDictConfig": "torch.distributed.fsdp",
    "FullyShardedDataParallel": "shardwise.frontends.fsdp",
    "LocalOptimStateDictConfig": "torch.distributed.fsdp",
    "LocalStateDictConfig": "torch.distributed.fsdp",
    "MixedPrecision": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "OptimStateDictConfig": "torch.distributed.fsdp",
    "OptimStateKeyType": "torch.distributed.fsdp",
    "PeerLostError": "shardwise.errors",
    "RanksDivergedError": "shardwise.errors",
    "ShardedOptimStateDictConfig": "torch.distributed.fsdp",
    "ShardedStateDictConfig": "torch.distributed.fsdp",
    "ShardingStrategy": "torch.distributed.fsdp",
    "ShardwiseError": "shardwise.errors",
    "StateDictConfig": "torch.distributed.fsdp",
    "StateDictSettings": "torch.distributed.fsdp",
    "StateDictType": "torch.distributed.fsdp",
    "UnshardHandle": "shardwise.sharding.module",
    "XlaFullyShardedDataParallel": "shardwise.frontends.xla",
    "checkpoint_module": "shardwise.frontends.activation",
    "clip_grad_norm_": "shardwise.sharding.grad",
    "fully_shard": "shardwise.sharding.api",
    "init_mesh": "shardwise.sharding.device_mesh",
    "materialize": "shardwise.sharding.init",
    "patch_torch": "shardwise.compat.patch",
    "register_fsdp_forward_method": "shardwise.sharding.module",
    "share_comm_ctx": "shardwise.sharding.module",
}


def __getattr__(name: str) -> Any:
    if name in ("inspect", "wrap"):
        return import_module(f"shardwise.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
