"""Fully Sharded Data Parallel for PyTorch that people can see into, predict and trust."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from shardwise._torch import DataParallelMeshDims
    from shardwise.compat.patch import patch_torch
    from shardwise.errors import PeerLostError, RanksDivergedError, ShardwiseError
    from shardwise.sharding.api import fully_shard
    from shardwise.sharding.grad import clip_grad_norm_
    from shardwise.sharding.init import materialize
    from shardwise.sharding.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerLostError",
    "RanksDivergedError",
    "ShardwiseError",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "materialize",
    "patch_torch",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

# Importing torch takes seconds, and the command line answers `--help` without it: names are
# fetched when they are first used.
_HOME = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "shardwise._torch",
    "FSDPModule": "shardwise.sharding.module",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "PeerLostError": "shardwise.errors",
    "RanksDivergedError": "shardwise.errors",
    "ShardwiseError": "shardwise.errors",
    "UnshardHandle": "shardwise.sharding.module",
    "clip_grad_norm_": "shardwise.sharding.grad",
    "fully_shard": "shardwise.sharding.api",
    "materialize": "shardwise.sharding.init",
    "patch_torch": "shardwise.compat.patch",
    "register_fsdp_forward_method": "shardwise.sharding.module",
    "share_comm_ctx": "shardwise.sharding.module",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
