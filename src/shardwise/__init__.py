"""Fully Sharded Data Parallel for PyTorch that people can see into, predict and trust."""

from typing import TYPE_CHECKING

from shardwise.base.lazy import lazy_names

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

    from shardwise import checkpoint, diloco, optim
    from shardwise._torch.fsdp import DataParallelMeshDims
    from shardwise.base.errors import (
        OffloadError,
        PeerLostError,
        RankFailedError,
        RanksDivergedError,
        ShardwiseError,
    )
    from shardwise.base.offload import DiskOffloadPolicy
    from shardwise.elastic.call import launch
    from shardwise.elastic.stop import GracefulStop
    from shardwise.frontends import wrap
    from shardwise.frontends.activation import checkpoint_module
    from shardwise.frontends.compat import patch_torch
    from shardwise.frontends.device_mesh import init_mesh
    from shardwise.frontends.fsdp import FullyShardedDataParallel
    from shardwise.frontends.fsdp2 import fully_shard
    from shardwise.frontends.meta import materialize
    from shardwise.frontends.module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from shardwise.frontends.pretrained.api import from_pretrained
    from shardwise.frontends.pretrained.saving import save_pretrained
    from shardwise.frontends.xla import XlaFullyShardedDataParallel
    from shardwise.insight import timeline
    from shardwise.insight.inspect.api import inspect
    from shardwise.insight.planning.api import plan
    from shardwise.insight.planning.settings import MachineConfig, PlannedStep
    from shardwise.insight.schema.sharding import StrategyConfig
    from shardwise.optim.norms import clip_grad_norm_
    from shardwise.sharding.ledger import GradientReductionHandle
    from shardwise.transport.wire import Wire

__version__ = "0.1.0.dev0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DiskOffloadPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GracefulStop",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MachineConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadError",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerLostError",
    "PlannedStep",
    "RankFailedError",
    "RanksDivergedError",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "ShardwiseError",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StrategyConfig",
    "UnshardHandle",
    "Wire",
    "XlaFullyShardedDataParallel",
    "checkpoint",
    "checkpoint_module",
    "clip_grad_norm_",
    "diloco",
    "from_pretrained",
    "fully_shard",
    "init_mesh",
    "inspect",
    "launch",
    "materialize",
    "optim",
    "patch_torch",
    "plan",
    "register_fsdp_forward_method",
    "save_pretrained",
    "share_comm_ctx",
    "timeline",
    "wrap",
]

_HOME = {
    "BackwardPrefetch": "torch.distributed.fsdp",
    "CPUOffload": "torch.distributed.fsdp",
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "DataParallelMeshDims": "shardwise._torch.fsdp",
    "DiskOffloadPolicy": "shardwise.base.offload",
    "FSDPModule": "shardwise.frontends.module",
    "FullOptimStateDictConfig": "torch.distributed.fsdp",
    "FullStateDictConfig": "torch.distributed.fsdp",
    "FullyShardedDataParallel": "shardwise.frontends.fsdp",
    "GracefulStop": "shardwise.elastic.stop",
    "GradientReductionHandle": "shardwise.sharding.ledger",
    "LocalOptimStateDictConfig": "torch.distributed.fsdp",
    "LocalStateDictConfig": "torch.distributed.fsdp",
    "MachineConfig": "shardwise.insight.planning.settings",
    "MixedPrecision": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadError": "shardwise.base.errors",
    "OffloadPolicy": "torch.distributed.fsdp",
    "OptimStateDictConfig": "torch.distributed.fsdp",
    "OptimStateKeyType": "torch.distributed.fsdp",
    "PeerLostError": "shardwise.base.errors",
    "PlannedStep": "shardwise.insight.planning.settings",
    "RankFailedError": "shardwise.base.errors",
    "RanksDivergedError": "shardwise.base.errors",
    "ShardedOptimStateDictConfig": "torch.distributed.fsdp",
    "ShardedStateDictConfig": "torch.distributed.fsdp",
    "ShardingStrategy": "torch.distributed.fsdp",
    "ShardwiseError": "shardwise.base.errors",
    "StateDictConfig": "torch.distributed.fsdp",
    "StateDictSettings": "torch.distributed.fsdp",
    "StateDictType": "torch.distributed.fsdp",
    "StrategyConfig": "shardwise.insight.schema.sharding",
    "UnshardHandle": "shardwise.frontends.module",
    "Wire": "shardwise.transport.wire",
    "XlaFullyShardedDataParallel": "shardwise.frontends.xla",
    "checkpoint": "shardwise.checkpoint",
    "checkpoint_module": "shardwise.frontends.activation",
    "clip_grad_norm_": "shardwise.optim.norms",
    "diloco": "shardwise.diloco",
    "from_pretrained": "shardwise.frontends.pretrained.api",
    "fully_shard": "shardwise.frontends.fsdp2",
    "init_mesh": "shardwise.frontends.device_mesh",
    "inspect": "shardwise.insight.inspect.api",
    "launch": "shardwise.elastic.call",
    "materialize": "shardwise.frontends.meta",
    "optim": "shardwise.optim",
    "patch_torch": "shardwise.frontends.compat",
    "plan": "shardwise.insight.planning.api",
    "register_fsdp_forward_method": "shardwise.frontends.module",
    "save_pretrained": "shardwise.frontends.pretrained.saving",
    "share_comm_ctx": "shardwise.frontends.module",
    "timeline": "shardwise.insight.timeline",
    "wrap": "shardwise.frontends.wrap",
}


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
