"""What was saved on one mesh loads on another, names and optimizer state included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.corpus.gathering import (
    join,
    parts_of_optimizer_state,
    parts_of_parameters,
    whole_parameters,
)
from tests.corpus.models import MODELS, make_batch, make_model
from tests.corpus.oracle import (
    Case,
    History,
    assert_same_history,
    make_optimizer,
    make_sharded,
    naming,
    train_in_parts,
    train_sharded,
)
from tests.threads import run_threads

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
        train_sharded(model, make_optimizer("sgd", model.parameters()), case, rank)
        for model in (source, target)
    ]
    return list(state), loaded, whole_parameters(make_sharded(case, world_size)), *histories


def _copy_both_ways(rank: int, world_size: int, case: Case) -> list[Any]:
    return [_copy_through_state_dict(rank, world_size, case, assign) for assign in (False, True)]


@pytest.mark.parametrize(
    ("model", "strategy", "world_size"),
    [
        ("mlp", "full-shard", 3),
        ("llama", "shard-grad-op", 2),
        pytest.param("mlp", "hybrid", 4, marks=pytest.mark.long),
    ],
)
def test_state_dict_loads_and_trains_on(model: str, strategy: str, world_size: int) -> None:
    for copied, assigned in run_threads(_copy_both_ways, world_size, Case(model, strategy)):
        for names, loaded, original, source, target in (copied, assigned):
            assert names == list(make_model(model).state_dict())
            _assert_equal(loaded, original)
            assert_same_history(target, source, rtol=None)


# ---- dcp.save and dcp.load ----

#: The optimizer of each model: of half of them the one whose states are the larger.
OPTIMIZERS = {"mlp": "adamw", "scalars": "sgd", "frozen": "adamw", "llama-tied": "sgd"}
NAMES = list(OPTIMIZERS)

#: Ranks and strategy that save, ranks and strategy that load.
MOVES = [
    (1, "full-shard", 3, "full-shard"),
    (3, "shard-grad-op", 2, "full-shard"),
    (2, "no-shard", 4, "hybrid"),
    (4, "hybrid", 3, "shard-grad-op"),
]
#: Those of `make long`, with all models: others change as much.
LONG_MOVES = [
    (2, "full-shard", 1, "full-shard"),
    (2, "full-shard", 2, "full-shard"),
    (4, "full-shard", 2, "no-shard"),
]


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model and its optimizer's state when it was saved or loaded, and how it went on.

    On a rank these are its parts, in the test the whole.
    """

    parameters: Whole
    optimizer: dict[str, Whole]
    afterwards: History


def _train_and_save(
    rank: int, world_size: int, strategy: str, names: list[str], folder: Path
) -> dict[str, Trained]:
    trained = {}
    for case in _cases(strategy, names):
        with naming(case):
            model = make_sharded(case, world_size)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            train_in_parts(model, optimizer, case, rank, steps=[0])
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optim_state}
            dcp.save(state, checkpoint_id=folder / case.model)
            trained[case.model] = _go_on(model, optimizer, case, rank)
    return trained


def _load_and_train(
    rank: int, world_size: int, strategy: str, names: list[str], folder: Path
) -> dict[str, Trained]:
    trained = {}
    for case in _cases(strategy, names):
        with naming(case):
            model = make_sharded(case, world_size, seed=OTHER_SEED)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optim_state}
            dcp.load(state, checkpoint_id=folder / case.model)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            trained[case.model] = _go_on(model, optimizer, case, rank)
    return trained


def _cases(strategy: str, names: list[str]) -> list[Case]:
    return [Case(name, strategy, OPTIMIZERS[name]) for name in names]


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, rank: int) -> Trained:
    return Trained(
        parts_of_parameters(model),
        parts_of_optimizer_state(model, optimizer),
        train_in_parts(model, optimizer, case, rank, steps=[1]),
    )


def _joined(by_rank: Sequence[dict[str, Trained]]) -> dict[str, Trained]:
    joined = {}
    for model in by_rank[0]:
        trained = [each[model] for each in by_rank]
        parts = [(each.parameters, each.optimizer, vars(each.afterwards)) for each in trained]
        parameters, optimizer, afterwards = join(parts)
        joined[model] = Trained(parameters, optimizer, History(**afterwards))
    return joined


@pytest.mark.parametrize(
    ("saved_by", "strategy", "loaded_by", "other_strategy", "names"),
    [
        # Every second model in turns; `make long` has the others.
        *((*move, NAMES[i % 2 :: 2]) for i, move in enumerate(MOVES)),
        *(
            pytest.param(*move, NAMES[1 - i % 2 :: 2], marks=pytest.mark.long)
            for i, move in enumerate(MOVES)
        ),
        *(pytest.param(*move, NAMES, marks=pytest.mark.long) for move in LONG_MOVES),
    ],
)
def test_a_checkpoint_loads_on_another_mesh_and_becomes_a_plain_file(
    tmp_path: Path,
    saved_by: int,
    strategy: str,
    loaded_by: int,
    other_strategy: str,
    names: list[str],
) -> None:
    by_model = _joined(run_threads(_train_and_save, saved_by, strategy, names, tmp_path))
    loaded = _joined(run_threads(_load_and_train, loaded_by, other_strategy, names, tmp_path))
    for model, before in by_model.items():
        after = loaded[model]
        _assert_equal(after.parameters, before.parameters)
        assert list(after.optimizer) == list(before.optimizer)
        for name, state in before.optimizer.items():
            _assert_equal(after.optimizer[name], state)
        if saved_by == loaded_by:  # the same ranks see the same batches: as if it never stopped
            assert_same_history(after.afterwards, before.afterwards, rtol=None)
        dcp_to_torch_save(tmp_path / model, tmp_path / "plain.pt")
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        unsharded = make_model(model, seed=OTHER_SEED)
        unsharded.load_state_dict(plain["model"], strict=True)
        _assert_equal(dict(unsharded.named_parameters()), before.parameters)
