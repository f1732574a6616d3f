"""What users may rely on: the public names, and that importing them is cheap."""

from __future__ import annotations

import subprocess
import sys

import torch.distributed.fsdp

import shardwise

PUBLIC = [
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


def test_the_public_names_are_these() -> None:
    assert shardwise.__all__ == PUBLIC
    assert all(hasattr(shardwise, name) for name in PUBLIC)


def test_every_public_name_is_documented() -> None:
    undocumented = [name for name in PUBLIC if not getattr(shardwise, name).__doc__]
    assert not undocumented


def test_an_fsdp_module_is_torchs_too() -> None:
    assert issubclass(shardwise.FSDPModule, torch.distributed.fsdp.FSDPModule)
    assert shardwise.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy


def test_every_method_of_torchs_fsdp_module_is_our_own() -> None:
    theirs = torch.distributed.fsdp.FSDPModule
    methods = {name: value for name, value in vars(theirs).items() if callable(value)}
    inherited = [
        name for name, value in methods.items() if getattr(shardwise.FSDPModule, name) is value
    ]

    assert not inherited, "these would run torch's code on our state"


def test_importing_the_library_does_not_import_what_only_trainings_need() -> None:
    trainings_only = {"transformers", "rich", "typer", "click", "matplotlib", "tensorboard"}

    assert not _packages_after("from shardwise import *") & trainings_only


def test_importing_the_package_alone_does_not_import_torch() -> None:
    assert "torch" not in _packages_after("import shardwise")


def _packages_after(code: str) -> set[str]:
    """Top-level packages that a fresh interpreter has imported after running ``code``."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {name.partition(".")[0] for name in result.stdout.split()}
