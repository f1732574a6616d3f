"""What was saved on one mesh loads on another, names and optimizer state included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

from tests.harness import run_ranks
from tests.parity.gathering import (
    join,
    parts_of_optimizer_state,
    parts_of_parameters,
    whole_parameters,
)
from tests.parity.models import MODELS, make_batch, make_model
from tests.parity.training import (
    Case,
    History,
    assert_same_history,
    make_optimizer,
    make_sharded,
    naming,
    train_in_parts,
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
def test_state_dict_loads_and_trains_on(
    ranks: Ranks, model: str, strategy: str, world_size: int
) -> None:
    for copied, assigned in ranks(_copy_both_ways, world_size, Case(model, strategy)):
        for names, loaded, original, source, target in (copied, assigned):
            assert names == list(make_model(model).state_dict())
            _assert_equal(loaded, original)
            assert_same_history(target, source, rtol=None)


# ---- the full state dict of torch.distributed.checkpoint ----


def _through_full_state_dict(
    rank: int, world_size: int, models: list[str]
) -> dict[str, tuple[Whole, Whole]]:
    results = {}
    for name in models:
        source = make_sharded(Case(name), world_size)
        full = get_model_state_dict(
            source, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        target = make_sharded(Case(name), world_size, seed=OTHER_SEED)
        set_model_state_dict(
            target,
            dict(full),  # filled on rank 0 only, and changed by the call
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        results[name] = full, whole_parameters(target)
    return results


def test_a_full_state_dict_is_the_unsharded_models(ranks: Ranks) -> None:
    models = ["mlp", "llama-tied"]
    first, second = ranks(_through_full_state_dict, 2, models)

    for name in models:
        expected = make_model(name)
        _assert_equal(first[name][0], expected.state_dict())
        assert second[name][0] == {}
        for _, loaded in (first[name], second[name]):
            _assert_equal(loaded, dict(expected.named_parameters()))


# ---- dcp.save and dcp.load ----

MODELS_MOVED = ["mlp", "scalars", "frozen", "llama-tied"]
MODELS_PLAIN = ["mlp", "scalars", "llama", "llama-tied"]

#: Ranks and strategy that save, ranks and strategy that load.
MOVES = [
    (1, "full-shard", 3, "full-shard"),
    (2, "full-shard", 1, "full-shard"),
    (2, "full-shard", 2, "full-shard"),
    (3, "shard-grad-op", 2, "full-shard"),
    (4, "full-shard", 2, "no-shard"),
    (2, "no-shard", 4, "hybrid"),
    (4, "hybrid", 3, "shard-grad-op"),
]
#: Those of `make long`: others change as much.
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


def _train_and_save(rank: int, world_size: int, cases: dict[Path, Case]) -> dict[Path, Trained]:
    trained = {}
    for path, case in cases.items():
        with naming(case):
            model = make_sharded(case, world_size)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            train_in_parts(model, optimizer, case, rank, steps=range(2))
            model_state, optim_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optimizer": optim_state}, checkpoint_id=path)
            trained[path] = _go_on(model, optimizer, case, rank)
    return trained


def _load_and_train(rank: int, world_size: int, cases: list[tuple[Path, Case]]) -> list[Trained]:
    trained = []
    for path, case in cases:
        with naming(case):
            model = make_sharded(case, world_size, seed=OTHER_SEED)
            optimizer = make_optimizer(case.optimizer, model.parameters())
            model_state, optim_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optim_state}
            dcp.load(state, checkpoint_id=path)
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
        parts_of_parameters(model),
        parts_of_optimizer_state(model, optimizer),
        train_in_parts(model, optimizer, case, rank, steps=range(2, 4)),
    )


def _joined(by_rank: Sequence[Trained]) -> Trained:
    parts = [(each.parameters, each.optimizer, vars(each.afterwards)) for each in by_rank]
    parameters, optimizer, afterwards = join(parts)
    return Trained(parameters, optimizer, History(**afterwards))


class Checkpoints:
    """What all tests save and load, each number of ranks at once: a world takes long to start."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._saved: dict[int, dict[Path, Trained]] = {}
        self._loaded: dict[int, dict[tuple[Path, Case], Trained]] = {}

    def path(self, saved_by: int, case: Case) -> Path:
        """Where the checkpoint of a case lies."""
        return self._folder / f"{saved_by}-{case.strategy}-{case.model}"

    def saved(self, saved_by: int, case: Case) -> Trained:
        """A training as it was when it was saved."""
        if saved_by not in self._saved:
            strategies = {"full-shard", *(move[1] for move in MOVES if move[0] == saved_by)}
            models = dict.fromkeys([*MODELS_MOVED, *MODELS_PLAIN])
            cases = [Case(model, strategy) for strategy in sorted(strategies) for model in models]
            by_path = {self.path(saved_by, case): case for case in cases}
            by_rank = self._ranks(_train_and_save, saved_by, by_path)
            self._saved[saved_by] = {
                path: _joined([trained[path] for trained in by_rank]) for path in by_path
            }
        return self._saved[saved_by][self.path(saved_by, case)]

    def loaded(self, loaded_by: int, path: Path, case: Case) -> Trained:
        """It, as it was when it was loaded as another case; all moves to as many ranks are made."""
        if loaded_by not in self._loaded:
            cases = []
            for saved_by, strategy, by, other_strategy in MOVES:
                for model in MODELS_MOVED if by == loaded_by else []:
                    self.saved(saved_by, Case(model, strategy))
                    path_of_it = self.path(saved_by, Case(model, strategy))
                    cases.append((path_of_it, Case(model, other_strategy)))
            by_rank = self._ranks(_load_and_train, loaded_by, cases)
            self._loaded[loaded_by] = {
                each: _joined(parts) for each, *parts in zip(cases, *by_rank, strict=True)
            }
        return self._loaded[loaded_by][path, case]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(run_ranks, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("saved_by", "strategy", "loaded_by", "other_strategy"),
    [pytest.param(*each, marks=pytest.mark.long if each in LONG_MOVES else ()) for each in MOVES],
)
def test_a_checkpoint_loads_on_another_mesh(
    checkpoints: Checkpoints, saved_by: int, strategy: str, loaded_by: int, other_strategy: str
) -> None:
    for model in MODELS_MOVED:
        case = Case(model, strategy)
        before = checkpoints.saved(saved_by, case)
        path = checkpoints.path(saved_by, case)
        after = checkpoints.loaded(loaded_by, path, Case(model, other_strategy))

        _assert_equal(after.parameters, before.parameters)
        assert list(after.optimizer) == list(before.optimizer)
        for name, state in before.optimizer.items():
            _assert_equal(after.optimizer[name], state)
        if saved_by == loaded_by:  # the same ranks see the same batches: as if it never stopped
            assert_same_history(after.afterwards, before.afterwards, rtol=None)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_becomes_a_plain_file_of_the_unsharded_model(
    checkpoints: Checkpoints, tmp_path: Path, world_size: int
) -> None:
    for name in MODELS_PLAIN:
        expected = checkpoints.saved(world_size, Case(name))
        dcp_to_torch_save(checkpoints.path(world_size, Case(name)), tmp_path / "plain.pt")

        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        unsharded = make_model(name, seed=OTHER_SEED)
        unsharded.load_state_dict(plain["model"], strict=True)
        _assert_equal(dict(unsharded.named_parameters()), expected.parameters)
