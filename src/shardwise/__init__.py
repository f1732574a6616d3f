"""Fully Sharded Data Parallel for PyTorch that people can see into, predict and trust."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.errors import PeerLostError, RanksDivergedError, ShardwiseError
from shardwise.sharding.api import fully_shard
from shardwise.sharding.grad import clip_grad_norm_
from shardwise.sharding.init import materialize
from shardwise.sharding.module import FSDPModule, UnshardHandle

__all__ = [
    "CPUOffloadPolicy",
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
]
