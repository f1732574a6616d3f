"""Checkpoints of models inside FullyShardedDataParallel hold shards, as all others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import FullyShardedDataParallel, XlaFullyShardedDataParallel, checkpoint, fully_shard
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.ranks.state import sharded_state_dict
from tests.sharding.nets import Net, batches, loss_of, seeded
from tests.worlds import on_threads


def _wrapped(cls: Any) -> nn.Module:
    net = seeded(Net)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = cls(block)
    return cls(net)


def _sharded() -> nn.Module:
    net = seeded(Net, 5)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss_of(net, batches(2, step)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(net: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters, by their names in the unwrapped model."""
    state = sharded_state_dict(net)
    return {name: value.full_tensor() for name, value in state.items()}


@pytest.mark.parametrize("cls", [FullyShardedDataParallel, XlaFullyShardedDataParallel])
@on_threads(2)
def test_a_wrapped_model_is_saved_as_shards_and_loaded_anywhere(
    rank: int, world_size: int, tmp_path: Path, cls: Any
) -> None:
    net = _wrapped(cls)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    _step(net, optimizer, rank, 0)
    checkpoint.save(tmp_path / "one", net, optimizer)
    weights = {entry.fqn: entry for entry in read_manifest(tmp_path / "one").section("model")}
    pieces = weights["model.blocks.0.up.weight"].pieces
    assert len(pieces) == world_size, "each rank's shard, not the whole"
    _step(net, optimizer, rank, 1)

    expected = _whole(net)
    for made in (_sharded(), _wrapped(cls)):
        other = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
        checkpoint.load(tmp_path / "one", made, other)
        _step(made, other, rank, 1)
        for name, value in _whole(made).items():
            assert torch.equal(value, expected[name]), name
