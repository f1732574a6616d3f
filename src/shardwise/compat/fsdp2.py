"""Every public name of torch's FSDP2, as Shardwise implements it.

It replaces ``torch.distributed.fsdp``, in an import or in ``sys.modules``:

    import sys
    import shardwise.compat.fsdp2
    sys.modules["torch.distributed.fsdp"] = shardwise.compat.fsdp2

Policies are torch's own classes, and ``FSDPModule`` is a subclass of torch's. Names that FSDP2 does
not have (those of FSDP1) are torch's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.fsdp as _torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise._torch.fsdp import DataParallelMeshDims, ShardPlacementResult
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shardwise.sharding.ledger import GradientReductionHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> Any:
    return getattr(_torch_fsdp, name)
