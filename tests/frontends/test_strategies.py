"""A strategy becomes a mesh and arguments of ``fully_shard``, as the table in the design says."""

from __future__ import annotations

import pytest

from shardwise.frontends.strategies import (
    MeshError,
    ShardingPlan,
    Strategy,
    parse_mesh,
    resolve,
)

ONE_D = ("dp_shard",)
TWO_D = ("dp_replicate", "dp_shard")


@pytest.mark.parametrize(
    ("strategy", "replicas", "plan"),
    [
        (Strategy.FULL_SHARD, None, ShardingPlan((8,), ONE_D, True)),
        (Strategy.SHARD_GRAD_OP, None, ShardingPlan((8,), ONE_D, False)),
        (Strategy.ZERO1, None, ShardingPlan((8,), ONE_D, False)),
        (Strategy.NO_SHARD, None, ShardingPlan((8, 1), TWO_D, False)),
        (Strategy.NO_SHARD, 8, ShardingPlan((8, 1), TWO_D, False)),
        (Strategy.FULL_SHARD, 1, ShardingPlan((8,), ONE_D, True)),
        (Strategy.HYBRID_SHARD, 2, ShardingPlan((2, 4), TWO_D, True)),
        (Strategy.HYBRID_SHARD_ZERO2, 4, ShardingPlan((4, 2), TWO_D, False)),
        (Strategy.HYBRID_SHARD, 1, ShardingPlan((1, 8), TWO_D, True)),
    ],
)
def test_table_of_strategies(strategy: Strategy, replicas: int | None, plan: ShardingPlan) -> None:
    assert resolve(strategy, 8, replicas=replicas) == plan


def test_hybrid_makes_one_replica_per_host_unless_told_otherwise() -> None:
    assert resolve(Strategy.HYBRID_SHARD, 8, hosts=2).shape == (2, 4)
    assert resolve(Strategy.HYBRID_SHARD, 8, hosts=2, replicas=4).shape == (4, 2)


@pytest.mark.parametrize(
    ("strategy", "replicas", "message"),
    [
        (Strategy.HYBRID_SHARD, None, "without a number of replicas"),
        (Strategy.HYBRID_SHARD, 3, "found 3, expected a number that divides the 8 ranks"),
        (Strategy.HYBRID_SHARD, 0, "found 0"),
        (Strategy.FULL_SHARD, 2, "found 2 with strategy full, expected 1"),
        (Strategy.NO_SHARD, 2, "found 2 with strategy no-shard, expected 8"),
    ],
)
def test_contradictions_are_errors(strategy: Strategy, replicas: int | None, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        resolve(strategy, 8, replicas=replicas)


def test_every_strategy_works_on_one_rank() -> None:
    for strategy in Strategy:
        plan = resolve(strategy, 1, replicas=1)
        assert all(size == 1 for size in plan.shape), strategy


def test_a_mesh_is_read_by_dimension_names() -> None:
    assert parse_mesh("dp_replicate=2, dp_shard=4") == {"dp_replicate": 2, "dp_shard": 4}
    assert parse_mesh("dp_shard=4") == {"dp_shard": 4}


@pytest.mark.parametrize(
    "text", ["", "4", "dp=4", "dp_shard=0", "dp_shard=x", "dp_shard=2,dp_shard=2"]
)
def test_a_mesh_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(MeshError, match="expected dp_replicate=R,dp_shard=S"):
        parse_mesh(text)


def test_a_plan_shows_itself_by_dimension() -> None:
    assert str(resolve(Strategy.HYBRID_SHARD, 8, replicas=2)) == "dp_replicate=2 x dp_shard=4"
