"""The bytes and collectives of a plan equal, to the byte, those of the same training on ranks.

The models, meshes, dtypes and transports are random, from fixed seeds. ``make fuzz`` tries more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

import shardwise
from shardwise import PlannedStep, StrategyConfig
from shardwise.base import libc
from shardwise.base.observe import Memory
from shardwise.frontends import cross_entropy
from shardwise.frontends.strategies import Strategy
from shardwise.insight.schema.sharding import parse_wires
from shardwise.insight.schema.training import DilocoConfig, Logits
from tests.planning.counted import (
    EXACT,
    CorpusTraining,
    LanguageTraining,
    RoutedTraining,
    Sent,
    Training,
    WithoutLogits,
    counted,
    planned,
    small_llama,
)

#: Between them every strategy, mesh, transport and dtype, and every kind of parameter.
SEEDS = (2, 6, 8, 11, 20, 24, 28, 40, 42)


def check(training: Training, ranks: Collection[int] | None = None) -> None:
    """Compare the plan of a training with what its ranks count, or some of them."""
    for rank, found in counted(training).items():
        if ranks is not None and rank not in ranks:
            continue
        plan = planned(training, rank)
        assert plan.most == found.most, f"bytes of rank {rank} in {training}"
        assert plan.sent == found.sent, f"collectives of rank {rank} in {training}"


def check_sent(training: Training) -> Sent:
    """Compare what ranks send, which is the same in every step; return what the last one does."""
    for rank, found in counted(training, looks=1).items():
        sent = planned(training, rank).sent
        assert sent == found.sent, f"collectives of rank {rank}"
    return sent


#: Models of the corpus that differ in what is allocated and sent. Not "unused": plans count the
#: states of parameters that no forward uses, which an optimizer does not make.
MODELS = (
    *("net", "frozen", "scalars", "tied", "recurrent", "checkpointed-each"),
    *("checkpointed-whole-reentrant", "nested", "positions", "inputs-written", "llama-tied"),
    *("linear-loss", "linear-loss-tied", "linear-loss-frozen", "linear-loss-recomputed"),
)


@pytest.mark.parametrize(
    ("name", "strategy"),
    list(zip(MODELS, itertools.cycle([Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP]))),
)
def test_what_plan_says_of_a_model_is_exact(
    name: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_FEWEST", 5)  # so that there are several chunks
    training = CorpusTraining(
        seed=0,
        mesh="dp=2",
        strategy=strategy,
        transport="collectives",
        param_dtype=None,
        reduce_dtype="fp32",
        optimizer="sgd-momentum",
        accumulate=1,
        name=name,
    )
    plan = shardwise.plan(
        training.blueprint("cpu"),
        training.mesh,
        sharding=StrategyConfig(strategy=strategy, shard_dtype=None, transport=training.transport),
        step=PlannedStep(optimizer=training.optimizer, batch=training.batch, step=training.loss),
    )
    found = counted(training)
    wanted = [{kind: each.most[kind] for kind in EXACT} for each in found.values()]
    of_ranks = [
        {kind: kind_of_rank.most.get(kind, 0) for kind in EXACT}
        for kind_of_rank in plan.ranks
        for _ in range(kind_of_rank.ranks)
    ]
    assert of_ranks in (wanted, wanted[::-1]), "largest first"
    sent: Counter[tuple[str, str, str]] = Counter()
    for (activity, dimension, _, _, nbytes, launches, _), calls in found[0].sent.items():
        sent[activity, dimension, "calls"] += calls
        sent[activity, dimension, "launches"] += calls * launches
        sent[activity, dimension, "bytes"] += calls * nbytes
    planned_to_be_sent = {
        (each.collective, each.dimension, what): value
        for each in plan.traffic
        for what, value in (
            *(("calls", each.calls), ("launches", each.launches), ("bytes", each.nbytes)),
        )
    }
    assert planned_to_be_sent == sent


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.long if seed in (2, 24) else ()) for seed in SEEDS],
)
def test_a_plan_is_exact(seed: int) -> None:
    check(Training.draw(seed))


#: Meshes of a language model, and what is sharded over them.
MESHES = (
    ("dp=2", Strategy.FULL_SHARD),
    ("tp=2", Strategy.FULL_SHARD),
    ("dp_replicate=2,dp_shard=1,tp=2", Strategy.HYBRID_SHARD),
    ("dp_replicate=2,dp_shard=2", Strategy.HYBRID_SHARD),
    ("dp=2,tp=2", Strategy.FULL_SHARD),
    ("dp=2,tp=2", Strategy.SHARD_GRAD_OP),
)
#: Each mesh with tensor parallelism once, as each transport and each dtype: other tests have dp.
ALWAYS = (
    (*MESHES[1], "collectives", None),  # nothing is converted
    (*MESHES[1], "c10d", "bf16"),
    (*MESHES[2], "collectives", "bf16"),
    (*MESHES[5], "collectives", "bf16"),
)


@pytest.mark.parametrize(
    ("mesh", "strategy", "transport", "param_dtype"),
    [
        *ALWAYS,
        *(
            pytest.param(*mesh, transport, "bf16", marks=pytest.mark.long)
            for mesh in MESHES
            for transport in ("collectives", "c10d")
            if (*mesh, transport, "bf16") not in ALWAYS
        ),
    ],
)
def test_a_plan_of_a_language_model_is_exact_on_every_mesh(
    mesh: str, strategy: Strategy, transport: str, param_dtype: str | None
) -> None:
    check(
        LanguageTraining(
            seed=0,
            mesh=mesh,
            strategy=strategy,
            transport=transport,
            param_dtype=param_dtype,
            reduce_dtype="fp32",
            optimizer="adamw",
            accumulate=2 if strategy is Strategy.SHARD_GRAD_OP else 1,
        ),
        ranks=[0],  # all are alike: each mesh divides each size
    )


def test_a_plan_of_a_language_model_without_whole_logits_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "_FEWEST", 10)
    for mesh, strategy, transport, param_dtype in ALWAYS[1:3]:
        training = WithoutLogits(
            seed=0,
            mesh=mesh,
            strategy=strategy,
            transport=transport,
            param_dtype=param_dtype,
            reduce_dtype="fp32",
            optimizer="adamw",
            accumulate=1,
        )
        check(training, ranks=[0])


@pytest.mark.parametrize(("reduce_dtype", "transport"), [(None, "collectives"), ("fp32", "c10d")])
def test_a_plan_knows_what_computes_in_float32(reduce_dtype: str | None, transport: str) -> None:
    training = RoutedTraining(
        seed=0,
        mesh="dp=2",
        strategy=Strategy.FULL_SHARD,
        transport=transport,
        param_dtype="bf16",
        reduce_dtype=reduce_dtype,
        optimizer="adamw",
        accumulate=2,
    )
    check(training)
    without = planned(replace(training, param_dtype=None), 0).most[Memory.FULL_PARAMETERS]
    assert planned(training, 0).most[Memory.FULL_PARAMETERS] > without // 2


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
    check_sent(replace(drawn, mesh=mesh, strategy=strategy, wire=parse_wires(wire)))


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
def test_the_bytes_that_a_plan_sends_over_two_levels_are_exact() -> None:
    drawn = replace(Training.draw(3, 4, transport="auto"), reshard_after_forward=2, per_host=2)
    wire = parse_wires("gather=int8,reduce=int8,error-feedback")
    training = replace(drawn, mesh="dp=4", strategy=Strategy.FULL_SHARD, wire=wire)
    sent = check_sent(training)
    assert {transport for *_, transport in sent} == {"shm", "gloo"}


@pytest.mark.skipif(not libc.has_futex(), reason="shared memory is for Linux on x86-64")
@pytest.mark.parametrize(("seed", "errors", "transport"), [(1, False, "shm"), (3, True, "c10d")])
def test_a_plan_of_replicas_that_train_apart_is_exact(
    seed: int, errors: bool, transport: str
) -> None:
    drawn = Training.draw(seed, 4, transport)
    apart = {"mesh": "dp_replicate=2,dp_shard=2", "strategy": Strategy.DILOCO}
    check(
        replace(
            drawn, reshard_after_forward=None, diloco=DilocoConfig(error_feedback=errors), **apart
        )
    )


def test_a_plan_of_a_model_of_transformers_may_have_its_logits_in_chunks() -> None:
    """Its own loss and that in chunks are of the same targets; chunks take less memory."""
    model = small_llama(9000)

    def peak(logits: Logits) -> int:
        step = PlannedStep(batch_size=4, seq_length=512, logits=logits)
        return shardwise.plan(model, "dp=2", step=step).peak

    whole, chunks = peak(Logits.WHOLE), peak(Logits.CHUNKS)
    assert peak(Logits.AUTO) == whole, "they take less than 128 MiB"
    assert chunks < whole // 4
