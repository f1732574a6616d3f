"""A tie that is lost on the way over the meta device is reported."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise import checkpoint, fully_shard
from tests.worlds import on_processes


class _Own(nn.Module):
    """A model with tied weights, and two layers that begin with zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(600, 4)  # of whose shards not every element is compared first
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 600, bias=False)
        for block in self.blocks:
            nn.init.zeros_(block.weight)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight


def _shard(model: _Own) -> _Own:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head)
    return fully_shard(model)


@on_processes(2)
def test_a_lost_tie_is_reported_when_values_arrive(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    whole = _Own().state_dict()
    torch.save(whole, tmp_path / f"{rank}.pt")
    for door in ("assign", "load_weights"):
        model = _shard(_Own().to("meta"))
        with pytest.warns(UserWarning, match=r"embed\.weight and head\.weight got equal values"):
            _load(door, model, whole, tmp_path / f"{rank}.pt")
        again = _Own().to("meta")
        again.tie_weights()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _load(door, _shard(again), whole, tmp_path / f"{rank}.pt")
        assert again.head.weight is again.embed.weight


def _load(door: str, model: _Own, whole: dict[str, torch.Tensor], file: Path) -> None:
    if door == "load_weights":
        checkpoint.load_weights(file, model)
        return
    mesh = model.embed.weight.device_mesh  # type: ignore[union-attr]
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    model.load_state_dict(state, assign=True)
