"""Sharded training equals unsharded training, step by step.

With one and two ranks the promise is equality bit for bit: the average of two gradients has one
value whatever the way they travel. With more ranks the order of a sum is the transport's business,
and results agree within the rounding of the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parity.models import MODELS
from tests.parity.training import (
    STRATEGIES,
    Case,
    History,
    assert_same_history,
    reference_training,
    sharded_trainings,
)

Ranks = Callable[..., list[Any]]

WORLD_SIZES = [1, 2, 3, 4]
TRANSPORTS = ["c10d", "collectives"]

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


def _train(
    ranks: Ranks, cases: list[Case], world_size: int, transport: str
) -> dict[Case, list[History]]:
    """Train all cases in one world; return each case's history by rank."""
    env = {"SHARDWISE_TRANSPORT": transport}
    per_rank = ranks(sharded_trainings, world_size, cases, env=env, timeout=240)
    return dict(zip(cases, zip(*per_rank, strict=True), strict=True))


def _tolerance(case: Case, world_size: int) -> dict[str, Any]:
    if case.max_norm is not None:
        # The norm is a sum over shards: its rounding, and the clipped step's, depends on the cut.
        return TOLERANCES[torch.float32]
    if case.dtype == torch.bfloat16:
        # torch's SGD itself rounds bfloat16 by the place of an element within its tensor.
        return TOLERANCES[torch.bfloat16]
    reduce_dtype = case.reduce_dtype or case.param_dtype or case.dtype
    # In float16 half of the division comes before the sum, where small gradients lose digits.
    if world_size <= 2 and reduce_dtype != torch.float16:
        return EXACT
    return TOLERANCES[reduce_dtype]


def _assert_equal_reference(
    ranks: Ranks, cases: list[Case], world_size: int, transport: str = "c10d"
) -> None:
    differences = []
    for case, histories in _train(ranks, cases, world_size, transport).items():
        references = reference_training(case, world_size)
        for rank, (history, reference) in enumerate(zip(histories, references, strict=True)):
            try:
                assert_same_history(history, reference, **_tolerance(case, world_size))
            except AssertionError as difference:
                differences.append(f"{case}, rank {rank} of {world_size}: {difference}")
    assert not differences, "\n".join(differences)


def _strategies(world_size: int) -> list[str]:
    """The strategies that a world allows: a hybrid mesh has two hosts."""
    return [name for name in STRATEGIES if world_size % 2 == 0 or not name.startswith("hybrid")]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("model", ["mlp", "llama-tied"])
def test_every_strategy(ranks: Ranks, model: str, world_size: int, transport: str) -> None:
    cases = [Case(model, strategy) for strategy in _strategies(world_size)]

    _assert_equal_reference(ranks, cases, world_size, transport)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_model(ranks: Ranks, world_size: int) -> None:
    cases = [
        Case(model, strategy, optimizer="sgd")
        for model in MODELS
        for strategy in ["full-shard", "shard-grad-op"]
    ]

    _assert_equal_reference(ranks, cases, world_size)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_precision(ranks: Ranks, world_size: int, transport: str) -> None:
    cases = [Case(model, **precision) for model in ["mlp", "llama"] for precision in PRECISIONS]

    _assert_equal_reference(ranks, cases, world_size, transport)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_accumulation(ranks: Ranks, world_size: int) -> None:
    """``shard-grad-op`` that reduces gradients after the last microbatch only is ZeRO-1."""
    cases = [
        Case("mlp", strategy, microbatches=3, sync_every=sync_every, **precision)
        for strategy in _strategies(world_size)
        for sync_every in [True, False]
        for precision in [{}, BF16_OVER_FP32]
    ]

    _assert_equal_reference(ranks, cases, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradient_clipping(ranks: Ranks, world_size: int) -> None:
    cases = [
        Case(model, strategy, optimizer="sgd", max_norm=0.05)
        for model in ["mlp", "scalars", "frozen", "llama-tied"]
        for strategy in _strategies(world_size)
    ]
    for case in cases:
        norms = reference_training(case, world_size)[0].norms
        assert any(norm > 0.05 for norm in norms), f"{case}: nothing to clip"

    _assert_equal_reference(ranks, cases, world_size)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_strategies_agree_bit_for_bit_over_two_ranks(ranks: Ranks, transport: str) -> None:
    for model in ["mlp", "conv", "llama-tied"]:
        cases = [Case(model, strategy) for strategy in STRATEGIES]
        first, *others = _train(ranks, cases, 2, transport).values()
        for histories in others:
            for history, reference in zip(histories, first, strict=True):
                assert_same_history(history, reference, **EXACT)
