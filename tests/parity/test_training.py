"""Sharded training equals unsharded training, step by step.

With one and two ranks the promise is equality bit for bit: the average of two gradients has one
value whatever the way they travel. With more ranks the order of a sum is the transport's business,
and results agree within the rounding of the dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch

from tests.parity.gathering import join
from tests.parity.models import MODELS
from tests.parity.training import (
    STRATEGIES,
    Case,
    History,
    assert_same_history,
    reference_training,
    sharded_trainings,
)
from tests.threads import run_threads
from tests.worlds import Ranks

T = TypeVar("T")
U = TypeVar("U")
#: How many ranks train, and over which transport.
World = tuple[int, str]


#: Worlds that `make long` trains in: the others hold the same cases, if not on the same meshes.
LONG: list[World] = [(2, "collectives"), (4, "collectives"), (4, "fake"), (1, "fake")]

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


@functools.cache
def _trained(ranks: Ranks, world_size: int, transport: str) -> dict[Case, History]:
    """Train what all tests look at in one world: starting one takes longer than most trainings."""
    tests = [of for of, worlds in CASES[transport].items() if world_size in worlds]
    cases = list(dict.fromkeys(case for of in tests for case in of((world_size, transport))))
    if transport == "fake":
        by_rank = run_threads(sharded_trainings, world_size, cases)
    else:
        env = {"SHARDWISE_TRANSPORT": transport}
        by_rank = ranks(sharded_trainings, world_size, cases, env=env, timeout=240)
    return {
        case: History(**join([vars(parts) for parts in histories]))
        for case, *histories in zip(cases, *by_rank, strict=True)
    }


def _tolerance(case: Case, world_size: int) -> dict[str, Any]:
    if case.max_norm is not None:
        # The norm is a sum over shards: its rounding, and the clipped step's, depends on the cut.
        return TOLERANCES[torch.float32]
    if case.dtype == torch.bfloat16:
        # torch's SGD itself rounds bfloat16 by the place of an element within its tensor.
        return TOLERANCES[torch.bfloat16]
    # In float16 half of the division comes before the sum, where small gradients lose digits.
    if world_size <= 2 and case.reduces_in != torch.float16:
        return EXACT
    return TOLERANCES[case.reduces_in]


def _assert_equal_reference(ranks: Ranks, cases: list[Case], world: World) -> None:
    world_size = world[0]
    histories = _trained(ranks, *world)
    differences = []
    for case in cases:
        reference = reference_training(case, world_size)
        try:
            assert_same_history(histories[case], reference, **_tolerance(case, world_size))
        except AssertionError as difference:
            differences.append(f"{case} over {world_size} ranks: {difference}")
    assert not differences, "\n".join(differences)


# ---- the cases of each test ----


def _strategies(world_size: int) -> list[str]:
    """The strategies that a world allows: a hybrid mesh has two hosts."""
    return [name for name in STRATEGIES if world_size % 2 == 0 or not name.startswith("hybrid")]


def _pairs(world: World, ones: Iterable[T], others: Iterable[U]) -> list[tuple[T, U]]:
    """Every second pair: two ranks train those that three and four do not. `make long` has all."""
    return [
        (one, other)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
        if world in LONG or (i + j + world[0] // 3) % 2 == 0
    ]


def _of_every_strategy(world: World) -> list[Case]:
    """Every strategy with two of three models, of which one has rows that nothing divides."""
    cases = [Case("mlp", strategy) for strategy in _strategies(world[0])]
    pairs = _pairs(world, ["conv", "llama-tied"], _strategies(world[0]))
    return [*cases, *(Case(model, strategy) for model, strategy in pairs)]


def _of_every_model(world: World) -> list[Case]:
    pairs = _pairs(world, MODELS, ["full-shard", "shard-grad-op"])
    return [Case(model, strategy, optimizer="sgd") for model, strategy in pairs]


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
    return [
        Case(model, strategy, optimizer="sgd", max_norm=0.05)
        for model, strategy in _pairs(world, models, _strategies(world[0]))
    ]


#: By transport: what is trained over it, and with how many ranks. What a transport does with bytes
#: is tests/transport's to check. So each kind of case is trained over a network by two ranks, which
#: agree to the last bit, and those that hold every kind of mesh by four; the rest by threads.
CASES: dict[str, dict[Callable[[World], list[Case]], list[int]]] = {
    "c10d": {
        _of_every_strategy: [2, 4],
        _of_every_model: [2],
        _of_every_precision: [2],
        _of_accumulation: [2, 4],
        _of_clipping: [2],
    },
    "collectives": {_of_every_strategy: [2, 4], _of_every_precision: [2]},
    "fake": {
        _of_every_strategy: [1, 3],
        _of_every_model: [1, 3, 4],
        _of_every_precision: [1, 4],
        _of_accumulation: [3],
        _of_clipping: [1, 4],
    },
}


# ---- the tests ----


def _worlds(of: Callable[[World], list[Case]]) -> pytest.MarkDecorator:
    """Run a test in every world of its cases: all tests of one after each other."""
    params = [
        pytest.param(
            (size, name),
            id=f"{size}-{name}",
            marks=[pytest.mark.long] if (size, name) in LONG else [],
        )
        for name, tests in CASES.items()
        for size in tests.get(of, [])
    ]
    return pytest.mark.parametrize("world", params, scope="module")


@_worlds(_of_every_strategy)
def test_every_strategy(ranks: Ranks, world: World) -> None:
    _assert_equal_reference(ranks, _of_every_strategy(world), world)


@_worlds(_of_every_model)
def test_every_model(ranks: Ranks, world: World) -> None:
    _assert_equal_reference(ranks, _of_every_model(world), world)


@_worlds(_of_every_precision)
def test_every_precision(ranks: Ranks, world: World) -> None:
    _assert_equal_reference(ranks, _of_every_precision(world), world)


@_worlds(_of_accumulation)
def test_accumulation(ranks: Ranks, world: World) -> None:
    _assert_equal_reference(ranks, _of_accumulation(world), world)


@_worlds(_of_clipping)
def test_gradient_clipping(ranks: Ranks, world: World) -> None:
    cases = _of_clipping(world)
    for case in cases:
        norms = reference_training(case, world[0]).norms
        assert any(norm > 0.05 for norm in norms), f"{case}: nothing to clip"

    _assert_equal_reference(ranks, cases, world)
