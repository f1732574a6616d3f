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

    from shardwise import checkpoint, compat, diloco, optim, pretrained, schedules, timeline, wrap
    from shardwise._torch.fsdp import DataParallelMeshDims
    from shardwise.base.errors import (
        OffloadError,
        PeerLostError,
        RankFailedError,
        RanksDivergedError,
        ShardwiseError,
    )
    from shardwise.base.offload import DiskOffloadPolicy
    from shardwise.compat import patch_torch
    from shardwise.elastic.call import launch
    from shardwise.elastic.stop import GracefulStop
    from shardwise.frontends.blocks import checkpoint_module, offload_activations
    from shardwise.frontends.cross_entropy import linear_cross_entropy
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
    from shardwise.frontends.relayout import relayout
    from shardwise.frontends.watch_ranks import watch_ranks
    from shardwise.frontends.xla import XlaFullyShardedDataParallel
    from shardwise.insight.audit import audit
    from shardwise.insight.inspect.read import ModelReport, inspect
    from shardwise.insight.inspect.report import Report
    from shardwise.insight.planning.api import ModelPlan, plan
    from shardwise.insight.planning.report import Plan
    from shardwise.insight.planning.settings import MachineConfig, PlannedStep
    from shardwise.insight.schema.sharding import StrategyConfig
    from shardwise.optim.norms import clip_grad_norm_
    from shardwise.pretrained.api import from_pretrained, save_pretrained
    from shardwise.runs.script_log import log
    from shardwise.sharding.ledger import GradientReductionHandle
    from shardwise.simulated.api import (
        SimulatedRank,
        SimulatedRanks,
        Simulation,
        simulate,
        simulation,
    )
    from shardwise.transport.wire import Wire
    from shardwise.weights.publish import Publication, publish
    from shardwise.weights.subscribe import Subscription, subscribe

__version__ = "0.1.0"

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
    "ModelPlan",
    "ModelReport",
    "OffloadError",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "PeerLostError",
    "Plan",
    "PlannedStep",
    "Publication",
    "RankFailedError",
    "RanksDivergedError",
    "Report",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "ShardwiseError",
    "SimulatedRank",
    "SimulatedRanks",
    "Simulation",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StrategyConfig",
    "Subscription",
    "UnshardHandle",
    "Wire",
    "XlaFullyShardedDataParallel",
    "audit",
    "checkpoint",
    "checkpoint_module",
    "clip_grad_norm_",
    "compat",
    "diloco",
    "from_pretrained",
    "fully_shard",
    "init_mesh",
    "inspect",
    "launch",
    "linear_cross_entropy",
    "log",
    "materialize",
    "offload_activations",
    "optim",
    "patch_torch",
    "plan",
    "pretrained",
    "publish",
    "register_fsdp_forward_method",
    "relayout",
    "save_pretrained",
    "schedules",
    "share_comm_ctx",
    "simulate",
    "simulation",
    "subscribe",
    "timeline",
    "watch_ranks",
    "wrap",
]


if not TYPE_CHECKING:  # else every misspelled name would have a type
    __getattr__, __dir__ = lazy_names(__name__)
