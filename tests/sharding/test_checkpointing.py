"""Activation checkpointing computes forward again: in backward, and in every way that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.sharding.state import state_of
from shardwise.sharding.states import GroupState
from tests.sharding.nets import WIDTH, Block, group_of, seeded, shard_blocks, train_alike
from tests.worlds import on_threads


class Inside(nn.Module):
    """A block that computes its own inside again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

        return x + checkpoint(inside, x, use_reentrant=self.reentrant)


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward: each, all of them together, or inside of each."""

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        self.where, self.reentrant = where, reentrant
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            Inside(reentrant) if where == "inside" else Block() for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.where == "each":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        elif self.where == "all":
            x = checkpoint(self._run, x, use_reentrant=self.reentrant)
        else:
            x = self._run(x)
        return self.head(x)


@pytest.mark.parametrize("k", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["each", "all", "inside", "whole"])
@on_threads(2)
def test_activation_checkpointing(
    rank: int, world_size: int, where: str, reentrant: bool, k: Any
) -> None:
    def make() -> nn.Module:
        return Checkpointed(where, reentrant)

    net, whole = seeded(make), seeded(make)
    shard_blocks(net, {"reshard_after_forward": k})
    if where == "whole":
        train_alike(_Whole(net, reentrant), _Whole(whole, reentrant), rank, world_size)
    else:
        train_alike(net, whole, rank, world_size)
    for block in net.blocks:
        assert group_of(block).state is GroupState.SHARDED
    assert not state_of(net).root.forward_root


class _Whole(nn.Module):
    """Computes all of a model again."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.model, x.requires_grad_(), use_reentrant=self.reentrant)
