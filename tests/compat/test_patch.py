"""Shardwise in programs that import torch's FSDP2."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import shardwise
from tests.harness import run_ranks

Ranks = Callable[..., list[Any]]

LIBRARY = """
from torch.distributed.fsdp import FSDPModule, fully_shard as shard

def prepare(model):
    for layer in model:
        shard(layer)
    return shard(model)

def is_sharded(model):
    return isinstance(model, FSDPModule) and shard.state(model) is not None
"""


def _library(name: str) -> types.ModuleType:
    """Import a program that was written for torch."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(LIBRARY, vars(module))
    return module


def _lent(rank: int, world_size: int) -> None:
    before = _library("imported_before")
    torchs = torch.distributed.fsdp.fully_shard
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with shardwise.patch_torch():
        assert torch.distributed.fsdp.fully_shard is not torchs
        inside = _library("imported_inside")
        before.prepare(model)
        assert isinstance(model, shardwise.FSDPModule)
        assert before.is_sharded(model)
        other = inside.prepare(nn.Sequential(nn.Linear(4, 4)))
        assert isinstance(other, shardwise.FSDPModule)
    for module in (before, inside, torch.distributed.fsdp):
        assert getattr(module, "shard", getattr(module, "fully_shard", None)) is torchs
    assert torchs.state(model) is shardwise.fully_shard.state(model)
    model(torch.ones(2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    theirs = before.prepare(nn.Sequential(nn.Linear(4, 4)))
    assert not isinstance(theirs, shardwise.FSDPModule), "torch's own again"


def test_inside_torchs_names_are_ours_and_outside_torchs(ranks: Ranks) -> None:
    run_ranks(_lent, 2)


def test_it_is_undone_after_an_exception_too() -> None:
    torchs = torch.distributed.fsdp.fully_shard

    def fail() -> None:
        with shardwise.patch_torch():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.distributed.fsdp.fully_shard is torchs
    assert shardwise.fully_shard is not torchs


def test_it_may_be_nested() -> None:
    torchs = torch.distributed.fsdp.fully_shard
    with shardwise.patch_torch(), shardwise.patch_torch():
        assert torch.distributed.fsdp.fully_shard is not torchs
    assert torch.distributed.fsdp.fully_shard is torchs


def _stand_in(rank: int, world_size: int) -> None:
    import shardwise.compat.fsdp2

    sys.modules["torch.distributed.fsdp"] = shardwise.compat.fsdp2
    program = _library("program")
    model = program.prepare(nn.Sequential(nn.Linear(4, 4)))
    assert isinstance(model, shardwise.FSDPModule)
    assert program.is_sharded(model)


def test_standing_in_for_torchs_module() -> None:
    run_ranks(_stand_in, 1)
