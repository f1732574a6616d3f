"""Sharded training on a device that torch knows as PrivateUse1, with values."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise import FullyShardedDataParallel, fully_shard, init_mesh
from shardwise.base import devices
from shardwise.base.scratch import file as scratch_file
from shardwise.optim import in_backward, offload
from shardwise.optim.offloaded import optimizer as optimizer_of_offload
from tests.corpus.collectives import customize
from tests.corpus.gathering import own_part
from tests.corpus.models import MODELS, make_batch, make_model
from tests.corpus.oracle import Case, make_sharded
from tests.devices.device import NAME, figures
from tests.devices.world import calls, run_on_device

MODEL = "buffered"


def _sharded(door: str = "fully_shard", **changes: Any) -> nn.Module:
    return make_sharded(Case(MODEL, door=door, **changes), 2, device_type=NAME)


def _loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss on a batch that is on the host: the root takes it to the device."""
    return MODELS[MODEL].loss(net, *make_batch(MODEL, rank, step, 0))


def _homes(rank: int, world_size: int) -> None:
    for door in (
        "fully_shard",
        "fully_shard, offloaded",
        "fully_shard, custom collectives",
        "fully_shard, from meta",
        "wrapper",
        "wrapper, offloaded",
    ):
        net = _sharded(door)
        home = "cpu" if "offloaded" in door else NAME
        assert {each.device.type for each in net.parameters()} == {home}, door
        assert {each.device.type for each in net.buffers()} == {NAME}, door
        before = len(calls())
        _loss(net, 0, rank).backward()
        assert len(calls()) > before, f"{door}: by collectives on the device"
    scatter = customize(net := _sharded())
    beside = make_sharded(Case(MODEL), world_size)  # on CPUs, in the same processes
    losses = [_loss(each, 0, rank) for each in (net, beside)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()
    assert set(scatter.ops) == {dist.ReduceOp.SUM}, "the backend is not known to average"


def test_shards_are_on_the_device_unless_they_are_offloaded() -> None:
    """That trainings equal unsharded ones there is tests/parity's to check."""
    run_on_device(_homes, 2)


def _memory(rank: int, world_size: int) -> list[int]:
    found = []
    net = _sharded()
    for _ in range(3):
        _loss(net, 0, rank).backward()
        net.zero_grad()
        gc.collect()
        found.append(figures.allocated)
    return found


def test_full_parameters_are_freed_between_steps() -> None:
    for found in run_on_device(_memory, 2):
        assert found[0] == found[1] == found[2]
        parameters = sum(p.numel() * 4 for p in make_model(MODEL).parameters())
        assert found[0] < parameters, "this rank's half, and buffers"


def _refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"mesh is on 'cuda' devices, .*expected pretend or cpu"):
        fully_shard(nn.Linear(2, 2), mesh=_mesh_of("cuda"))
    with pytest.raises(ValueError, match=f"device_type on rank {rank}: found cuda"):
        init_mesh(device_type="cuda", dp=2)
    with pytest.raises(ValueError, match="expected pretend or cpu"):
        FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cuda", 0))
    assert devices.has_streams(torch.device(NAME, 0))
    assert not devices.pins(torch.device(NAME, 0))


def _mesh_of(kind: str) -> Any:
    mesh = init_mesh(device_type="cpu", dp=2)
    mesh._device_type = kind
    return mesh


def test_what_the_device_does_not_have() -> None:
    run_on_device(_refused, 2)


def _optimizers(net: nn.Module, way: str, folder: Path) -> torch.optim.Optimizer:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05, foreach=False)

    to = "host" if "host" in way else f"disk:{folder}"
    if "in backward" in way:
        return in_backward(net, lambda params: offload(make(params), to))
    return offload(make(net.parameters()), to)


def _states_elsewhere(rank: int, world_size: int, folder: Path) -> None:
    scratch_file.SMALLEST = 8  # all states but counts of steps
    optimizer_of_offload._TOGETHER = 20
    reference = _sharded()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.05, foreach=False)
    ways = ("host", "disk", "host in backward", "disk in backward")
    nets = {way: _sharded() for way in ways}
    optimizers = {way: _optimizers(net, way, folder) for way, net in nets.items()}
    for step in range(3):
        for net, optimizer in [
            (reference, theirs),
            *zip(nets.values(), optimizers.values(), strict=True),
        ]:
            _loss(net, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:  # between steps, states are tensors as ever
                for param in net.parameters():
                    optimizer.state[param]["exp_avg"].mul_(0.5)
            if step == 1:
                optimizer.load_state_dict(
                    tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict())
                )
    for way, net in nets.items():
        optimizer = optimizers[way]
        for mine, other in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.equal(_host(mine), _host(other)), way
            for key, value in theirs.state[other].items():
                found = optimizer.state[mine][key]
                assert torch.equal(_host(found), _host(value)), f"{way}: {key}"
                if key != "step" and _host(found).numel() > 1:
                    assert own_part(found).device.type == "cpu", f"{way}: {key}"


def _host(value: torch.Tensor) -> torch.Tensor:
    return own_part(value.detach()).cpu()


def test_offloaded_states_are_those_on_the_device(tmp_path: Path) -> None:
    run_on_device(_states_elsewhere, 2, tmp_path)
