"""The bytes and collectives of a plan equal, to the byte, those of the same training on ranks.

The models, meshes, dtypes and transports are random, from fixed seeds. ``make fuzz`` tries more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.base.scratch import libc
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.sharding import parse_wires
from tests.planning.counted import LanguageTraining, Training, counted, planned

#: Between them every strategy, mesh, transport and dtype, and every kind of parameter.
SEEDS = (2, 6, 8, 11, 20, 24, 28, 40, 42)


def check(*trainings: Training) -> None:
    """Compare the plans of trainings with what their ranks count."""
    for training, by_rank in zip(trainings, counted(*trainings), strict=True):
        for rank, found in enumerate(by_rank):
            plan = planned(training, rank)
            assert plan.most == found.most, f"bytes of rank {rank} in {training}"
            assert plan.sent == found.sent, f"collectives of rank {rank} in {training}"


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.long if seed in (2, 24) else ()) for seed in SEEDS],
)
def test_a_plan_is_exact(seed: int) -> None:
    check(Training.draw(seed))


@pytest.mark.parametrize(
    "shardings",
    [
        [("dp=2", Strategy.FULL_SHARD)],
        [("tp=2", Strategy.FULL_SHARD)],
        [
            ("dp_replicate=2,dp_shard=2", Strategy.HYBRID_SHARD),
            ("dp=2,tp=2", Strategy.FULL_SHARD),
            ("dp=2,tp=2", Strategy.SHARD_GRAD_OP),
            ("dp_replicate=2,dp_shard=1,tp=2", Strategy.HYBRID_SHARD),
        ],
    ],
    ids=["dp=2", "tp=2", "4 ranks"],
)
def test_plans_of_a_language_model_are_exact_on_every_mesh(
    shardings: list[tuple[str, Strategy]],
) -> None:
    check(
        *(
            LanguageTraining(
                seed=0,
                mesh=mesh,
                strategy=strategy,
                transport=transport,
                param_dtype="bf16",
                reduce_dtype="fp32",
                optimizer="adamw",
                accumulate=2,
            )
            for mesh, strategy in shardings
            for transport in ("c10d", "collectives")
        )
    )


@pytest.mark.parametrize(
    ("mesh", "strategy", "wire"),
    [
        ("dp_replicate=2,dp_shard=2", Strategy.HYBRID_SHARD, "reduce=int8,error-feedback"),
        pytest.param("dp=2", Strategy.FULL_SHARD, "fp8", marks=pytest.mark.long),
    ],
)
def test_the_bytes_that_a_plan_sends_over_wires_are_exact(
    mesh: str, strategy: Strategy, wire: str
) -> None:
    drawn = replace(Training.draw(3, transport="c10d"), reshard_after_forward=None)
    training = replace(drawn, mesh=mesh, strategy=strategy, wire=parse_wires(wire))
    [by_rank] = counted(training)
    for rank, found in enumerate(by_rank):
        assert planned(training, rank).sent == found.sent, f"collectives of rank {rank}"


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
def test_the_bytes_that_a_plan_sends_over_two_levels_are_exact() -> None:
    drawn = replace(Training.draw(3, 4, transport="auto"), reshard_after_forward=2, per_host=2)
    wire = parse_wires("gather=int8,reduce=int8,error-feedback")
    training = replace(drawn, mesh="dp=4", strategy=Strategy.FULL_SHARD, wire=wire)
    [by_rank] = counted(training)
    for rank, found in enumerate(by_rank):
        sent = planned(training, rank).sent
        assert sent == found.sent, f"collectives of rank {rank}"
        assert {transport for *_, transport in sent} == {"shm", "gloo"}


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
@pytest.mark.parametrize(("seed", "outer_states", "transport"), [(1, 2, "shm"), (3, 3, "c10d")])
def test_a_plan_of_replicas_that_train_apart_is_exact(
    seed: int, outer_states: int, transport: str
) -> None:
    drawn = Training.draw(seed, 4, transport)
    apart = {"mesh": "dp_replicate=2,dp_shard=2", "strategy": Strategy.DILOCO}
    check(replace(drawn, reshard_after_forward=None, outer_states=outer_states, **apart))
