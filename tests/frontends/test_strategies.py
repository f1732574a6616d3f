"""Strategies and meshes by name resolve to a mesh and arguments of ``fully_shard``."""

from __future__ import annotations

import math

import pytest

from shardwise.frontends.strategies import (
    MeshError,
    ShardingPlan,
    Strategy,
    WantedMesh,
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


NAMED = "NAME=N with a name among dp_replicate, dp, dp_shard, tp"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", NAMED),
        ("4", NAMED),
        ("pp=4", NAMED),
        ("dp_shard", "dp_shard=N, N a number from 1"),
        ("dp_shard=0", "dp_shard=N, N a number from 1"),
        ("dp_shard=x", "dp_shard=N, N a number from 1"),
        ("dp_shard=" + "9" * 5000, "dp_shard=N, N a number from 1"),
        ("dp_shard=2,dp_shard=2", "each dimension once"),
    ],
)
def test_a_wrong_mesh_is_an_error(text: str, expected: str) -> None:
    with pytest.raises(MeshError) as refused:
        WantedMesh.parse(text)
    assert refused.value.expected == expected


def test_a_plan_shows_itself_by_dimension() -> None:
    assert str(resolve(Strategy.HYBRID_SHARD, 8, replicas=2)) == "dp_replicate=2 x dp_shard=4"


@pytest.mark.parametrize(
    ("text", "names", "shape"),
    [
        ("dp=2,tp=4", ("dp", "tp"), (2, 4)),
        ("dp_replicate=2,dp_shard=3", ("dp_replicate", "dp_shard"), (2, 3)),
        ("dp_replicate=2,tp=3", ("dp_replicate", "dp_shard", "tp"), (2, 1, 3)),
        ("tp=8", ("tp",), (8,)),
    ],
)
def test_a_mesh_that_need_not_exist(
    text: str, names: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    mesh = WantedMesh.parse(text)
    assert (mesh.names, mesh.shape) == (names, shape)
    assert mesh.size == math.prod(shape)
    assert mesh.data_parallel == tuple(name for name in names if name != "tp")
    assert mesh.tensor_parallel == (shape[-1] if "tp" in names else 1)
