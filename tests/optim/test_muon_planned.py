"""A plan rehearses the step of Muon, messages included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise
from shardwise import PlannedStep, StrategyConfig
from shardwise.frontends.strategies import Strategy

#: Bytes by which ranks check that they have the same gradients: a number for every other rank.
NUMBER = 8


class Pair(nn.Module):
    """Two equal matrices, so that two ranks own one each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize(
    ("mesh", "strategy", "ranks", "sent"),
    [
        # Its half of the other's matrix to the owner, and half of its own result back.
        ("dp=2", Strategy.FULL_SHARD, 2, 2 * (32 * 64 * 2)),
        # Every rank has both matrices, so only results travel: all of its own.
        ("dp=2", Strategy.NO_SHARD, 2, 64 * 64 * 2),
        # Rank 0 owns the first: it sends its half of the second to rank 1, and of its result one
        # half to each of ranks 1 and 3, and the other one to rank 2.
        ("dp_replicate=2,dp_shard=2", Strategy.HYBRID_SHARD, 4, 4 * (32 * 64 * 2)),
    ],
)
def test_all_to_alls_of_the_first_rank_are_planned(
    mesh: str, strategy: Strategy, ranks: int, sent: int
) -> None:
    plan = shardwise.plan(
        Pair(),
        mesh,
        sharding=StrategyConfig(strategy=strategy, transport="c10d"),
        step=PlannedStep(optimizer="muon", batch=lambda count: torch.zeros(count, 64)),
    )
    planned = sum(each.sent for each in plan.traffic if each.collective == "all-to-all")
    assert planned == sent + NUMBER * (ranks - 1)
