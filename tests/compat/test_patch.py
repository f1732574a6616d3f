"""Shardwise in programs that import torch's FSDP2."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import shardwise
from tests.frontends.training import assert_bits, train, trained_twin
from tests.sharding.nets import Block, Net, seeded
from tests.worlds import on_processes

LIBRARY = """
from torch.distributed.fsdp import FSDPModule, fully_shard as shard

def prepare(model):
    for layer in model:
        shard(layer)
    return shard(model)

def is_sharded(model):
    return isinstance(model, FSDPModule) and shard.state(model) is not None
"""


def _library(name: str, source: str = LIBRARY) -> types.ModuleType:
    """Import a program that was written for torch."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(source, vars(module))
    return module


@on_processes(2)
def test_inside_torchs_names_are_ours_and_outside_torchs(rank: int, world_size: int) -> None:
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


def test_it_is_undone_after_an_exception_too() -> None:
    torchs = torch.distributed.fsdp.fully_shard

    def fail() -> None:
        with shardwise.patch_torch():
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert torch.distributed.fsdp.fully_shard is torchs
    assert shardwise.fully_shard is not torchs


@pytest.mark.parametrize("name", ["fully_shard", "FullyShardedDataParallel"])
def test_it_may_be_nested(name: str) -> None:
    torchs = getattr(torch.distributed.fsdp, name)
    with shardwise.patch_torch():
        with shardwise.patch_torch():
            assert getattr(torch.distributed.fsdp, name) is not torchs
        assert getattr(torch.distributed.fsdp, name) is not torchs
    assert getattr(torch.distributed.fsdp, name) is torchs


FSDP1_LIBRARY = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, StateDictType
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap

def prepare(model, *classes):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy(set(classes)), device_id=None)

def prepare_inside_out(model):
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=True):
        return wrap(model)

def whole_state(model):
    assert isinstance(model, FullyShardedDataParallel)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()
"""


@on_processes(2)
def test_inside_fsdp1_is_ours_and_outside_torchs(rank: int, world_size: int) -> None:
    before = _library("fsdp1_before", FSDP1_LIBRARY)
    torchs = torch.distributed.fsdp.FullyShardedDataParallel
    from torch.distributed.checkpoint import state_dict as torchs_own

    with shardwise.patch_torch():
        inside = _library("fsdp1_inside", FSDP1_LIBRARY)
        for library in (before, inside):
            assert library.FSDP is library.FullyShardedDataParallel
            assert issubclass(library.FSDP, shardwise.FullyShardedDataParallel)
        model = before.prepare(seeded(Net), Block)
        train(model, rank, world_size)
        expected, _ = trained_twin(world_size)
        assert_bits(model.module, expected)
        assert len(before.FSDP.fsdp_modules(model)) > 1, "blocks are units of their own"
        assert isinstance(inside.prepare_inside_out(nn.Linear(4, 4)), before.FSDP)
        assert torchs_own.FSDP is torchs, "which takes our models for what they are: of DTensors"
    with shardwise.patch_torch():
        state = inside.whole_state(model)
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name
    for library in (before, inside):
        assert library.FSDP is library.FullyShardedDataParallel is torchs
    assert isinstance(model, shardwise.FullyShardedDataParallel)


@on_processes(1)
def test_standing_in_for_torchs_module(rank: int, world_size: int) -> None:
    import shardwise.compat.fsdp2

    sys.modules["torch.distributed.fsdp"] = shardwise.compat.fsdp2
    program = _library("program")
    model = program.prepare(nn.Sequential(nn.Linear(4, 4)))
    assert isinstance(model, shardwise.FSDPModule)
    assert program.is_sharded(model)
