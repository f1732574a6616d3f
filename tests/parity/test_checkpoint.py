"""What was saved on one mesh loads on another, names and optimizer state included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.parity.gathering import optimizer_state, whole_parameters
from tests.parity.models import MODELS, make_batch, make_model
from tests.parity.training import (
    Case,
    History,
    assert_same_history,
    make_optimizer,
    make_sharded,
    naming,
    train_sharded,
)

Ranks = Callable[..., list[Any]]
Whole = dict[str, Tensor]

OTHER_SEED = 7


def _assert_equal(actual: Whole, expected: Whole) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


# ---- state_dict and load_state_dict ----


def _copy_through_state_dict(
    rank: int, world_size: int, case: Case, assign: bool
) -> tuple[list[str], Whole, Whole, History, History]:
    source = make_sharded(case, world_size)
    target = make_sharded(case, world_size, seed=OTHER_SEED)
    with torch.no_grad():  # leaves some groups whole, as a look at the validation loss would
        for model in (source, target):
            MODELS[case.model].loss(model, *make_batch(case.model, rank, 0, 0))
    state = source.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values()), "a value is not sharded"
    if assign:  # the model takes the very tensors, so they must not be the source's own
        state = {name: value.clone() for name, value in state.items()}

    outcome = target.load_state_dict(state, assign=assign)

    assert not outcome.missing_keys
    assert not outcome.unexpected_keys
    loaded = whole_parameters(target)
    histories = [
        train_sharded(model, make_optimizer("adamw", model.parameters()), case, rank)
        for model in (source, target)
    ]
    return list(state), loaded, whole_parameters(make_sharded(case, world_size)), *histories


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize(
    ("model", "strategy", "world_size"),
    [("mlp", "full-shard", 3), ("llama", "shard-grad-op", 2), ("mlp", "hybrid", 4)],
)
def test_state_dict_loads_and_trains_on(
    ranks: Ranks, model: str, strategy: str, world_size: int, assign: bool
) -> None:
    case = Case(model, strategy)
    for names, loaded, original, source, target in ranks(
        _copy_through_state_dict, world_size, case, assign
    ):
        assert names == list(make_model(model).state_dict())
        _assert_equal(loaded, original)
        assert_same_history(target, source, rtol=None)


# ---- the full state dict of torch.distributed.checkpoint ----


def _through_full_state_dict(rank: int, world_size: int, case: Case) -> tuple[Whole, Whole]:
    source = make_sharded(case, world_size)
    full = get_model_state_dict(
        source, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    target = make_sharded(case, world_size, seed=OTHER_SEED)
    set_model_state_dict(
        target,
        dict(full),  # filled on rank 0 only, and changed by the call
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return full, whole_parameters(target)


@pytest.mark.parametrize("model", ["mlp", "llama-tied"])
def test_a_full_state_dict_is_the_unsharded_models(ranks: Ranks, model: str) -> None:
    expected = make_model(model)

    results = ranks(_through_full_state_dict, 2, Case(model))

    _assert_equal(results[0][0], expected.state_dict())
    assert results[1][0] == {}
    for _, loaded in results:
        _assert_equal(loaded, dict(expected.named_parameters()))


# ---- dcp.save and dcp.load ----


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model and its optimizer's state when it was saved or loaded, and how it went on."""

    parameters: Whole
    optimizer: dict[str, Whole]
    afterwards: History


def _train_and_save(
    rank: int, world_size: int, cases: list[Case], directory: Path
) -> list[Trained]:
    trained = []
    for case in cases:
        with naming(case):
            model = make_sharded(case, world_size)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            train_sharded(model, optimizer, case, rank, steps=range(2))
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optim_state}
            dcp.save(state, checkpoint_id=directory / case.model)
            trained.append(_go_on(model, optimizer, case, rank))
    return trained


def _load_and_train(
    rank: int, world_size: int, cases: list[Case], directory: Path
) -> list[Trained]:
    trained = []
    for case in cases:
        with naming(case):
            model = make_sharded(case, world_size, seed=OTHER_SEED)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optim_state}
            dcp.load(state, checkpoint_id=directory / case.model)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            trained.append(_go_on(model, optimizer, case, rank))
    return trained


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, rank: int) -> Trained:
    return Trained(
        whole_parameters(model),
        optimizer_state(model, optimizer),
        train_sharded(model, optimizer, case, rank, steps=range(2, 4)),
    )


@pytest.mark.parametrize(
    ("saved_by", "strategy", "loaded_by", "other_strategy"),
    [
        (1, "full-shard", 3, "full-shard"),
        (2, "full-shard", 1, "full-shard"),
        (2, "full-shard", 2, "full-shard"),
        (3, "shard-grad-op", 2, "full-shard"),
        (4, "full-shard", 2, "no-shard"),
        (2, "no-shard", 4, "hybrid"),
        (4, "hybrid", 3, "shard-grad-op"),
    ],
)
def test_a_checkpoint_loads_on_another_mesh(
    ranks: Ranks,
    tmp_path: Path,
    saved_by: int,
    strategy: str,
    loaded_by: int,
    other_strategy: str,
) -> None:
    models = ["mlp", "scalars", "frozen", "llama-tied"]

    saved = ranks(_train_and_save, saved_by, [Case(name, strategy) for name in models], tmp_path)
    loaded = ranks(
        _load_and_train, loaded_by, [Case(name, other_strategy) for name in models], tmp_path
    )

    for rank in range(loaded_by):
        for before, after in zip(saved[0], loaded[rank], strict=True):
            _assert_equal(after.parameters, before.parameters)
            assert list(after.optimizer) == list(before.optimizer)
            for name, state in before.optimizer.items():
                _assert_equal(after.optimizer[name], state)
    if saved_by == loaded_by:  # the same ranks see the same batches: as if it had never stopped
        for rank in range(loaded_by):
            for before, after in zip(saved[rank], loaded[rank], strict=True):
                assert_same_history(after.afterwards, before.afterwards, rtol=None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_becomes_a_plain_file_of_the_unsharded_model(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    models = ["mlp", "scalars", "llama", "llama-tied"]
    trained = ranks(_train_and_save, world_size, [Case(name) for name in models], tmp_path)[0]

    for name, expected in zip(models, trained, strict=True):
        dcp_to_torch_save(tmp_path / name, tmp_path / "plain.pt")

        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        unsharded = make_model(name, seed=OTHER_SEED)
        unsharded.load_state_dict(plain["model"], strict=True)
        _assert_equal(dict(unsharded.named_parameters()), expected.parameters)
