"""Sharded training equals unsharded training, step by step.

With one and two ranks the promise is equality bit for bit: the average of two gradients has one
value whatever the way they travel. With more ranks the order of a sum is the transport's business,
and results agree within the rounding of the dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch

from shardwise.base import libc
from tests.corpus.gathering import join
from tests.corpus.instruments import run
from tests.corpus.models import MODELS
from tests.corpus.oracle import (
    DOORS,
    STRATEGIES,
    Case,
    History,
    assert_same_history,
    check_trainings,
    reference_training,
    sharded_trainings,
)
from tests.devices.device import NAME

T = TypeVar("T")
U = TypeVar("U")
#: How many ranks train, and on which instrument.
World = tuple[int, str]
Kinds = dict[World, list[Callable[[World], list["Case"]]]]

NEEDS_SHM = pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")

EXACT: dict[str, Any] = {"rtol": None}

# What a sum in another order may change, by the dtype that gradients are added up in.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.bfloat16: {"rtol": 5e-2, "atol": 1e-2},
    torch.float16: {"rtol": 5e-3, "atol": 1e-4},
    torch.float32: {"rtol": 2e-5, "atol": 2e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-14},
}

BF16_OVER_FP32: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
PRECISIONS: list[dict[str, Any]] = [
    {"dtype": torch.float64},
    {"reduce_dtype": torch.float64},
    BF16_OVER_FP32,
    # Adam divides a gradient by its own size, and so would blow up what bfloat16 rounds.
    {"param_dtype": torch.bfloat16, "optimizer": "sgd"},
    {"param_dtype": torch.float16, "optimizer": "sgd"},
    {"dtype": torch.bfloat16, "optimizer": "sgd"},
]


def _tolerance(case: Case, world_size: int) -> dict[str, Any]:
    if case.max_norm is not None:
        # The norm is a sum over shards: its rounding, and the clipped step's, depends on the cut.
        return TOLERANCES[torch.float32]
    if case.model in ("tied", "odd", "linear-loss-tied-apart"):
        # The averages of several groups' gradients are added, not what is in them.
        return TOLERANCES[torch.float32]
    if case.dtype == torch.bfloat16:
        # torch's SGD itself rounds bfloat16 by the place of an element within its tensor.
        return TOLERANCES[torch.bfloat16]
    # In float16 half of the division comes before the sum, where small gradients lose digits.
    if world_size <= 2 and case.reduces_in != torch.float16:
        return EXACT
    return TOLERANCES[case.reduces_in]


# ---- the cases ----


def _strategies(world_size: int) -> list[str]:
    """The strategies that a world allows: a hybrid mesh has two hosts."""
    names = [name for name in STRATEGIES if name != "one-replica"]
    return [name for name in names if world_size % 2 == 0 or not name.startswith("hybrid")]


def _pairs(world: World, ones: Iterable[T], others: Iterable[U]) -> list[tuple[T, U]]:
    """Every second pair: two ranks train those that three and four do not. `make long` has all."""
    return [
        (one, other)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
        if world not in SHORT or (i + j + world[0] // 3) % 2 == 0
    ]


def _of_every_strategy(world: World) -> list[Case]:
    """Every strategy with two of three models, of which one has rows that nothing divides."""
    cases = [Case("mlp", strategy) for strategy in _strategies(world[0])]
    pairs = _pairs(world, ["conv", "llama-tied"], _strategies(world[0]))
    return [*cases, *(Case(model, strategy) for model, strategy in pairs)]


def _of_every_model(world: World) -> list[Case]:
    pairs = _pairs(world, MODELS, ["full-shard", "shard-grad-op"])
    return [Case(model, strategy, "sgd", evaluates=True) for model, strategy in pairs]


def _of_every_precision(world: World) -> list[Case]:
    pairs = _pairs(world, ["mlp", "llama"], PRECISIONS)
    return [Case(model, **precision) for model, precision in pairs]


def _of_accumulation(world: World) -> list[Case]:
    """``shard-grad-op`` that reduces gradients after the last microbatch only is ZeRO-1."""
    ways = list(itertools.product(_strategies(world[0]), [True, False]))
    return [
        Case("mlp", strategy, "sgd", microbatches=3, sync_every=sync_every, **precision)
        for (strategy, sync_every), precision in _pairs(world, ways, [{}, BF16_OVER_FP32])
    ]


def _of_clipping(world: World) -> list[Case]:
    models = ["mlp", "scalars", "frozen", "llama-tied"]
    cases = [
        Case(model, strategy, optimizer="sgd", max_norm=0.05)
        for model, strategy in _pairs(world, models, _strategies(world[0]))
    ]
    for case in cases:
        norms = reference_training(case, world[0]).norms
        assert any(norm > 0.05 for norm in norms), f"{case}: nothing to clip"
    return cases


def _of_every_door(world: World) -> list[Case]:
    """Every model through the wrapper, and the others' doors with what each is there for."""
    doors = [door for door in DOORS if door != "fully_shard"]
    if world[0] > 2:
        hybrids = [name for name in STRATEGIES if name.startswith("hybrid")]
        return [
            Case("net", strategy, "sgd", door)
            for door in ("wrapper", "shard_blocks")
            for strategy in hybrids
        ]
    flat = ["full-shard", "shard-grad-op"]
    models = [
        Case(model, flat[number % 2], "sgd", "wrapper", evaluates=True)
        for number, model in enumerate(MODELS)
    ]
    every = _strategies(world[0])
    strategies = [Case("net", strategy, "adamw", "wrapper") for strategy in every]
    others = [
        Case("net", strategy, "sgd", door)
        for door, strategy in _pairs(world, doors, every)
        if door != "wrapper for XLA" or strategy in flat
    ]
    return [*models, *strategies, *others]


def _of_every_door_in_use(world: World) -> list[Case]:
    """Precisions, accumulation and clipping through the doors that translate them."""
    doors = ["wrapper", "shard_blocks", "wrapper for XLA"]
    precisions = [
        Case("mlp", door=door, **{"optimizer": "sgd", **precision})
        for door, precision in _pairs(world, doors, PRECISIONS)
        if door != "wrapper for XLA" or precision.get("reduce_dtype") in (None, torch.float32)
    ]
    others: list[dict[str, Any]] = [
        {"microbatches": 3, "sync_every": False},
        {"microbatches": 2, "sync_every": True},
        {"max_norm": 0.05},
    ]
    return precisions + [
        Case("net", strategy, "sgd", door, **other)
        for door, other in itertools.product(doors, others)
        for strategy in ("full-shard", "shard-grad-op")
    ]


def _of_a_device() -> list[Case]:
    """What is different where memory is not the host's."""
    plain = [
        Case("buffered", strategy, door=door)
        for door in ("fully_shard", "wrapper")
        for strategy in ("full-shard", "shard-grad-op", "no-shard")
    ]
    others = [
        *(f"fully_shard, {way}" for way in ("collectives", "offloaded", "custom collectives")),
        *("fully_shard, from meta", "wrapper, offloaded"),
    ]
    in_bf16 = Case("buffered", optimizer="sgd", **BF16_OVER_FP32)
    return [*plain, *(Case("buffered", door=door) for door in others), in_bf16]


#: By world: what is trained in it. What a transport does with bytes is tests/transport's to check.
#: So threads train each kind of case on every kind of mesh, and processes what differs for them:
#: in shared memory what ranks gather into is each other's, and over a network they only meet.
SHORT: Kinds = {
    (2, "shm"): [_of_every_model],
    (2, "c10d"): [_of_every_strategy],
    (2, "threads"): [
        _of_every_door,
        _of_every_door_in_use,
        _of_every_precision,
        _of_accumulation,
        _of_clipping,
    ],
    (3, "threads"): [_of_every_model],
    (4, "threads"): [_of_every_strategy, _of_accumulation],
}
#: And what `make long` trains: all pairs, and more worlds.
LONG: Kinds = {
    (4, "c10d"): [_of_every_strategy, _of_accumulation, _of_clipping],
    (2, "collectives"): [_of_every_strategy, _of_every_precision],
    (4, "collectives"): [_of_every_strategy],
    (1, "threads"): [_of_every_strategy, _of_every_model, _of_every_precision, _of_clipping],
    (6, "threads"): [_of_every_model, _of_every_door, _of_every_precision, _of_clipping],
}


# ---- the tests ----


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(
            world,
            marks=[*([pytest.mark.long] * (world in LONG)), *([NEEDS_SHM] * (world[1] == "shm"))],
            id="{}-{}".format(*world),
        )
        for world in [*SHORT, *LONG]
    ],
)
def test_trainings_equal_unsharded_ones(world: World) -> None:
    """All of a world at once: starting one takes longer than most trainings."""
    world_size, instrument = world
    cases = [case for of in (SHORT | LONG)[world] for case in of(world)]
    cases = list(dict.fromkeys(cases))
    by_rank = run(instrument, sharded_trainings, world_size, cases)
    differences = []
    for case, *parts in zip(cases, *by_rank, strict=True):
        history = History(**join([vars(each) for each in parts]))
        reference = reference_training(case, world_size)
        try:
            assert_same_history(history, reference, **_tolerance(case, world_size))
        except AssertionError as difference:
            differences.append(f"{case}: {difference}")
    assert not differences, "\n".join(differences)


def test_a_device() -> None:
    run("device", check_trainings, 2, _of_a_device(), NAME)
    clipped = [Case("buffered", optimizer="sgd", max_norm=0.05)]
    run("device", check_trainings, 2, clipped, NAME, *TOLERANCES[torch.float32].values())
