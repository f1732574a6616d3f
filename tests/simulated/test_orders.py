"""Whatever the order of the ranks' turns, the runtime computes the same bits."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.schedules import Exhaustive, Random, Schedule
from tests.corpus.gathering import join
from tests.corpus.models import MODELS
from tests.corpus.oracle import Case, History, assert_same_history, sharded_trainings

# One model of each kind of trouble: ties, frozen parameters, recomputation, experts, scalars.
FEW = ("mlp", "tied", "frozen", "llama-tied", "scalars", "odd")


def _history(case: Case, world_size: int, schedule: Schedule) -> History:
    ranks = shardwise.simulate(
        lambda: sharded_trainings(dist.get_rank(), world_size, [case]),
        world_size,
        schedule=schedule,
    )
    return History(**join([vars(rank.value[0]) for rank in ranks]))


@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=() if model in FEW else pytest.mark.long) for model in MODELS],
)
def test_random_orders_train_the_same(model: str) -> None:
    for number, strategy in enumerate(("full-shard", "shard-grad-op")):
        case = Case(model, strategy, "sgd")
        expected = _history(case, 2, Schedule())
        found = _history(case, 2, Random(number))
        assert_same_history(found, expected, rtol=None)


def _step(reshard: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    for layer in (model[0], model[1], model):
        shardwise.fully_shard(layer, reshard_after_forward=reshard)
    loss = model(torch.ones(1, 2) * (1 + dist.get_rank())).square().sum()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
    return [*model[0].weight.to_local().flatten().tolist(), loss.item()]


@pytest.mark.parametrize(
    ("reshard", "limit"),
    [(True, 30), *(pytest.param(each, 500, marks=pytest.mark.long) for each in (True, False))],
)
def test_all_orders_of_a_step_are_the_same(reshard: bool, limit: int) -> None:
    ranks = shardwise.simulate(functools.partial(_step, reshard), 2, schedule=Exhaustive(limit))
    assert ranks.orders == limit  # there are more
