"""The page on compatibility names what the installed torch has, and so does the stand-in module."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed.fsdp
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import _fully_shard as torch_home

import shardwise
from shardwise.compat import fsdp2

PAGE = (Path(__file__).parents[2] / "docs" / "torch-compatibility.md").read_text()
FSDP1 = {
    *("BackwardPrefetch", "CPUOffload", "FullOptimStateDictConfig", "FullStateDictConfig"),
    *("FullyShardedDataParallel", "LocalOptimStateDictConfig", "LocalStateDictConfig"),
    *("MixedPrecision", "OptimStateDictConfig", "OptimStateKeyType"),
    *("ShardedOptimStateDictConfig", "ShardedStateDictConfig", "ShardingStrategy"),
    *("StateDictConfig", "StateDictSettings", "StateDictType"),
}


def _listed(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))


def _torch_names() -> set[str]:
    exported = set(torch.distributed.fsdp.__all__) - FSDP1
    return exported | set(torch_home._fully_shard.__all__)


def _public_methods(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def _own_methods() -> set[str]:
    """Return our public methods that the class of torch does not have."""
    bases = shardwise.FSDPModule.__mro__
    ours = bases[: bases.index(TorchFSDPModule)]
    return set().union(*map(_public_methods, ours))


def test_the_page_lists_every_function_and_class_of_torch() -> None:
    assert _listed("Functions and classes") - {"fully_shard.state"} >= _torch_names()


def test_the_page_lists_every_method_of_torchs_module() -> None:
    assert _listed("Methods of `FSDPModule`") >= _public_methods(TorchFSDPModule)


def test_every_method_of_torchs_module_is_our_own() -> None:
    assert _own_methods() >= _public_methods(TorchFSDPModule)


def test_what_the_page_lists_exists() -> None:
    for name in _listed("Functions and classes") - {"fully_shard.state"}:
        assert name in fsdp2.__all__, name
    for name in _listed("Methods of `FSDPModule`"):
        assert name in _own_methods(), name


def test_the_stand_in_has_every_name_and_torchs_other_names() -> None:
    for name in torch.distributed.fsdp.__all__:
        assert getattr(fsdp2, name) is not None
    assert fsdp2.fully_shard is shardwise.fully_shard
    assert fsdp2.FullyShardedDataParallel is torch.distributed.fsdp.FullyShardedDataParallel
