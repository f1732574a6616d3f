"""What a plan is made for: which mesh a strategy gets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.frontends.strategies import MeshError, Strategy, WantedMesh
from shardwise.insight.planning.settings import MOST_RANKS, Settings, SettingsError


def _settings(mesh: str, **values: Any) -> Settings:
    return Settings(mesh=WantedMesh.parse(mesh, MOST_RANKS), **values)


@pytest.mark.parametrize(
    ("mesh", "strategy", "world", "reshard"),
    [
        ("dp=8", Strategy.FULL_SHARD, "dp=8", True),
        ("dp_shard=8", Strategy.FULL_SHARD, "dp_shard=8", True),
        ("dp=8", Strategy.SHARD_GRAD_OP, "dp=8", False),
        ("dp=8", Strategy.NO_SHARD, "dp_replicate=8,dp_shard=1", False),
        ("dp=8,tp=2", Strategy.FULL_SHARD, "dp=8,tp=2", True),
        ("dp=4,tp=2", Strategy.NO_SHARD, "dp_replicate=4,dp_shard=1,tp=2", False),
        ("dp_replicate=2,dp_shard=4", Strategy.HYBRID_SHARD, "dp_replicate=2,dp_shard=4", True),
        ("dp_replicate=2,dp=4", Strategy.HYBRID_SHARD_ZERO2, "dp_replicate=2,dp_shard=4", False),
        ("dp_replicate=1,dp_shard=4", Strategy.FULL_SHARD, "dp_shard=4", True),
        ("tp=4", Strategy.FULL_SHARD, "dp_shard=1,tp=4", True),
        ("dp=50000,tp=2", Strategy.FULL_SHARD, "dp=50000,tp=2", True),
    ],
)
def test_a_strategy_gets_a_mesh(mesh: str, strategy: Strategy, world: str, reshard: bool) -> None:
    settings = _settings(mesh, strategy=strategy)
    assert str(settings.world) == world
    assert settings.sharding.reshard_after_forward is reshard


@pytest.mark.parametrize(
    ("mesh", "strategy", "message"),
    [
        ("dp=8", Strategy.HYBRID_SHARD, "the number of replicas: dp_replicate=R,dp_shard=S"),
        ("dp_replicate=2,dp_shard=4", Strategy.FULL_SHARD, "or a hybrid strategy"),
        ("dp_replicate=2,dp_shard=4", Strategy.NO_SHARD, "2 with strategy no-shard"),
    ],
)
def test_a_strategy_that_does_not_fit_the_mesh_is_refused(
    mesh: str, strategy: Strategy, message: str
) -> None:
    with pytest.raises(MeshError, match=message):
        _settings(mesh, strategy=strategy)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "batch_size: found 0, expected 1 or more"),
        ({"batch_size": 10**23}, "2,147,483,647 at most"),
        ({"accumulate": 1001}, "accumulate: found 1,001, expected at most 1,000"),
        ({"seq_length": -1}, "seq_length: found -1"),
        ({"reshard_after_forward": 3}, "reshard_after_forward: found 3, expected host or a number"),
        ({"param_dtype": "float8"}, "param_dtype: found float8, expected one of fp32, bf16"),
        ({"optimizer": "lamb"}, "optimizer: found lamb, expected one of adamw"),
        ({"transport": "tcp"}, "transport: found tcp, expected one of auto, shm"),
        ({"clip_grad": float("nan")}, "clip_grad: found nan"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        _settings("dp=2", **values)


def test_tensor_parallel_ranks_share_their_samples() -> None:
    assert _settings("dp=4,tp=2", batch_size=3, accumulate=5).samples == 3 * 5 * 4


def test_more_ranks_than_can_be_planned_for_are_refused() -> None:
    with pytest.raises(MeshError, match="at most 100,000"):
        WantedMesh.parse("dp=100001", MOST_RANKS)
