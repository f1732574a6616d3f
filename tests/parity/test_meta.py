"""A model built on the meta device, sharded, and materialized shard by shard is the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise import materialize
from tests.corpus.gathering import join, whole_parameters
from tests.corpus.models import MODELS, make_model
from tests.corpus.oracle import (
    DOORS,
    STRATEGIES,
    Case,
    History,
    assert_same_history,
    make_optimizer,
    make_sharded,
    naming,
    train_in_parts,
)
from tests.worlds import Ranks, on_threads

NAMES = ["mlp", "conv", "shared", "llama", "llama-tied"]


def _initializer(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """What gives a module its initial values, if its model has rules of its own."""
    return model._init_weights if isinstance(model, PreTrainedModel) else None


def _reset(module: nn.Module) -> None:
    """Give a module its initial values by its own rules."""
    getattr(module, "reset_parameters", lambda: None)()


def _on_meta_device(name: str, strategy: str, world_size: int) -> nn.Module:
    with torch.device("meta"):
        model = MODELS[name].build()
    mesh, blocks = STRATEGIES[strategy].mesh(world_size), MODELS[name].blocks(model)
    return DOORS["fully_shard"](model, blocks, mesh, Case(name, strategy))


@pytest.mark.parametrize(
    ("strategy", "world_size", "names"),
    [
        ("full-shard", 1, NAMES[1::2]),
        ("full-shard", 2, NAMES),  # all in one world, and every second in the others
        pytest.param("full-shard", 3, NAMES, marks=pytest.mark.long),
        ("no-shard", 2, NAMES[1::2]),
        ("hybrid", 4, NAMES[::2]),
    ],
)
def test_materialized_equals_unsharded_initialization_and_trains_alike(
    threads: Ranks, world_size: int, strategy: str, names: list[str]
) -> None:
    by_rank = threads(_materialized, world_size, strategy, names)
    for name, *parts in zip(names, *by_rank, strict=True):
        with naming(Case(name, strategy)):
            history, other = (History(**each) for each in join(parts))
            assert_same_history(history, other, rtol=None)


def _materialized(
    rank: int, world_size: int, strategy: str, names: list[str]
) -> list[list[dict[str, Any]]]:
    """Train what was materialized and a twin; return this rank's parts of both histories."""
    trained = []
    for name in names:
        case = Case(name, strategy)
        with naming(case):
            model = _on_meta_device(name, strategy, world_size)
            torch.manual_seed(5)
            materialize(model, init=_initializer(model))
            expected = make_model(name)
            torch.manual_seed(5)
            with torch.no_grad():
                expected.apply(_initializer(expected) or _reset)
            _assert_equal(whole_parameters(model), dict(expected.named_parameters()), name)
            _assert_equal(dict(model.named_buffers()), dict(expected.named_buffers()), name)
            twin = make_sharded(case, world_size)
            twin.load_state_dict(model.state_dict())
            histories = (
                train_in_parts(each, make_optimizer("sgd", each.parameters()), case, rank)
                for each in (model, twin)
            )
            trained.append([vars(each) for each in histories])
    return trained


@on_threads(3)
def test_a_state_dict_loads_into_a_model_without_values(rank: int, world_size: int) -> None:
    model = _on_meta_device("mlp", "full-shard", world_size)
    model.to_empty(device="cpu")
    model.load_state_dict(make_sharded(Case("mlp"), world_size).state_dict())
    _assert_equal(whole_parameters(model), dict(make_model("mlp").named_parameters()), "mlp")


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], model: str) -> None:
    assert list(actual) == list(expected), model
    for name, value in expected.items():
        assert torch.equal(actual[name], value), f"{model}: {name}"
