"""Torch's checkpoints load into our modules, and ours into torch's, through its own format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise import checkpoint, fully_shard
from tests.corpus.gathering import optimizer_state, whole_parameters
from tests.corpus.models import MODELS, make_model
from tests.corpus.oracle import STRATEGIES, make_optimizer
from tests.threads import run_threads

Whole = dict[str, Tensor]

SHARD_BY = {"ours": fully_shard, "torch": torch_fully_shard}
NAMES = ("mlp", "frozen", "llama-tied")
OTHER_SEED = 7


def _build(
    kind: str, name: str, world_size: int, seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(name, seed=seed)
    mesh = STRATEGIES["full-shard"].mesh(world_size)
    for block in MODELS[name].blocks(model):
        SHARD_BY[kind](block, mesh=mesh)
    SHARD_BY[kind](model, mesh=mesh)
    return model, make_optimizer("adamw", model.parameters())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = param.detach().clone() if param.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Whole, dict[str, Whole]]:
    return whole_parameters(model), optimizer_state(model, optimizer)


def _save(rank: int, world_size: int, kind: str, folder: Path) -> list[Any]:
    found = []
    for name in NAMES:
        model, optimizer = _build(kind, name, world_size, seed=0)
        _step(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=folder / name)
        checkpoint.save(folder / f"{name}-ours", model, optimizer)
        found.append(_whole(model, optimizer))
    return found


def _load(rank: int, world_size: int, kind: str, folder: Path) -> list[Any]:
    """Load each checkpoint by torch's functions, and the one of our own format by ours."""
    found = []
    for name in NAMES:
        model, optimizer = _build(kind, name, world_size, OTHER_SEED)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        other, other_optimizer = _build(kind, name, world_size, OTHER_SEED)
        checkpoint.load(folder / f"{name}-ours", other, other_optimizer)
        found.append((_whole(model, optimizer), _whole(other, other_optimizer)))
    return found


@pytest.mark.parametrize(
    ("saved_by", "ranks_then", "loaded_by", "ranks_now"),
    [("torch", 2, "ours", 3), ("ours", 3, "torch", 2)],
)
def test_one_loads_what_the_other_saved(
    tmp_path: Path, saved_by: str, ranks_then: int, loaded_by: str, ranks_now: int
) -> None:
    expected = run_threads(_save, ranks_then, saved_by, tmp_path)[0]
    for by_rank in run_threads(_load, ranks_now, loaded_by, tmp_path):
        for name, before, loads in zip(NAMES, expected, by_rank, strict=True):
            for way, after in zip(("dcp", "ours"), loads, strict=True):
                _assert_same(before, after, f"{name} by {way}")


def _assert_same(before: Any, after: Any, what: str) -> None:
    (parameters, states), (found, found_states) = before, after
    assert list(found) == list(parameters), what
    for name, value in parameters.items():
        assert torch.equal(found[name], value), f"{what}: {name}"
    assert found_states.keys() == states.keys(), what
    for name, state in states.items():
        for key, value in state.items():
            assert torch.equal(found_states[name][key], value), f"{what}: {name} {key}"
