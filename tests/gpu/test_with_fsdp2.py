"""The tools for torch's own FSDP2, on a device: each does what it does on CPUs."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise import checkpoint
from tests.corpus.models import WIDTH
from tests.gpu.devices import Devices, device, mesh
from tests.sharding.nets import batches


def _net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    sizes = (WIDTH, 32, WIDTH, 24, WIDTH)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes))).to(device())


def _sharded(world_size: int, seed: int = 0) -> Any:
    net = _net(seed)
    for module in (*net, net):
        fully_shard(module, mesh=mesh(world_size))
    return net


def _loss(net: nn.Module, x: torch.Tensor) -> Any:
    return (net(x) - x).square().mean()


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> Any:
    for step in range(3):
        loss = _loss(net, batches(world_size, step)[rank].to(device()))
        loss.backward()
        shardwise.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _watched(rank: int, world_size: int, folder: Path) -> None:
    net, alone = _sharded(world_size), _sharded(world_size)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (net, alone)]
    recording = shardwise.timeline.record(folder / "timeline", model=net)
    with shardwise.watch_ranks(net), recording:
        found = _train(net, optimizers[0], rank, world_size)
    assert torch.equal(found, _train(alone, optimizers[1], rank, world_size))
    assert "Sequential" in str(shardwise.inspect(net))


def test_watching_and_recording_change_no_bit(devices: Devices, tmp_path: Path) -> None:
    devices.run(_watched, 2, tmp_path)
    assert any((tmp_path / "timeline").iterdir())


def _kept(rank: int, world_size: int, folder: Path) -> None:
    net = _sharded(world_size)
    optimizer = shardwise.optim.AdamW8bit(net.parameters(), lr=0.01)
    _train(net, optimizer, rank, world_size)
    checkpoint.save(folder / "saved", net, optimizer)
    other = _sharded(world_size, seed=1)
    its = shardwise.optim.AdamW8bit(other.parameters(), lr=0.01)
    checkpoint.load(folder / "saved", other, its)
    found = _train(other, its, rank, world_size)
    assert torch.equal(found, _train(net, optimizer, rank, world_size))
    assert math.isfinite(found.item())


def test_eight_bit_states_and_checkpoints(devices: Devices, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    devices.run(_kept, 2, tmp_path)


def _whole(rank: int, world_size: int) -> None:
    net = _sharded(world_size)
    optimizer = shardwise.optim.whole(torch.optim.Adafactor, net.parameters(), lr=0.01)
    plain = _net()
    its = torch.optim.Adafactor(plain.parameters(), lr=0.01)
    for step in range(3):
        x = batches(world_size, step).flatten(0, 1).to(device())  # the same on all ranks
        for model, each in ((net, optimizer), (plain, its)):
            _loss(model, x).backward()
            each.step()
            each.zero_grad()
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        found: Any = param
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def test_any_optimizer(devices: Devices) -> None:
    devices.run(_whole, 2)
