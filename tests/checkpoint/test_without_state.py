"""Optimizers without state, with tensors in their settings, or with empty groups come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import FullyShardedDataParallel, checkpoint
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import consolidate, convert
from shardwise.optim import local, whole
from tests.worlds import on_threads

Make = Callable[[nn.Module], torch.optim.Optimizer]


def _empty_group(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters())}, {"params": [], "lr": 0.7}]
    return torch.optim.SGD(groups, lr=0.5)


#: Optimizers, and whether they take a step before they are saved.
OPTIMIZERS: dict[str, tuple[Make, int]] = {
    "SGD": (lambda model: torch.optim.SGD(model.parameters(), lr=0.5), 1),
    "SGD before its first step": (lambda model: torch.optim.SGD(model.parameters(), lr=0.5), 0),
    "AdamW before its first step": (lambda model: torch.optim.AdamW(model.parameters(), lr=0.5), 0),
    "a tensor as lr": (
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)),
        1,
    ),
    "an empty group": (_empty_group, 1),
    "local": (lambda model: local(torch.optim.SGD, model.parameters(), lr=0.5), 1),
    "whole": (lambda model: whole(torch.optim.SGD, model.parameters(), lr=0.5), 1),
}


def _load(way: str, folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Load what the way saves."""
    fsdp = FullyShardedDataParallel
    if way == "by name":
        state = torch.load(folder / "by name.pt", weights_only=True)
        fsdp.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    elif way == "a file for each rank":
        checkpoint.load_rank_checkpoint(str(folder / "files"), model, optimizer)
    else:
        checkpoint.load(folder / "folder", model, optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_threads(2)
def test_what_is_saved_is_loaded(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    make, steps = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    optimizer = make(model)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] *= 0.5
    checkpoint.save(tmp_path / "folder", model, optimizer)
    checkpoint.save_rank_checkpoint(str(tmp_path / "files"), model, optimizer)
    ways = ["folder", "a file for each rank"]
    if name != "whole":
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        if rank == 0:
            torch.save(state, tmp_path / "by name.pt")
        ways.append("by name")
    torch.distributed.barrier()
    for way in ways:
        loaded = make(model)
        _load(way, tmp_path, model, loaded)
        assert [group["lr"] for group in loaded.param_groups] == [
            group["lr"] for group in optimizer.param_groups
        ], way
        assert loaded.state.keys() == optimizer.state.keys(), way
        model(torch.ones(2, 3)).sum().backward()
        loaded.step()
        loaded.zero_grad()


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("local", "whole")])
def test_what_is_converted_is_loaded(name: str, tmp_path: Path) -> None:
    make, steps = OPTIMIZERS[name]
    model = nn.Linear(3, 3)
    optimizer = make(model)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    checkpoint.save(tmp_path / "folder", model, optimizer)
    consolidate(tmp_path / "folder", tmp_path / "all.pt", everything=True)
    by_name = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]
    assert by_name.keys() == {"state", "param_groups"}
    make(model).load_state_dict(by_name)
    convert(tmp_path / "folder", tmp_path / "dcp", Format.DCP)
    convert(tmp_path / "dcp", tmp_path / "back", Format.SHARDWISE)
    for folder in ("folder", "back"):
        loaded = make(model)
        checkpoint.load(tmp_path / folder, model, loaded)
        assert loaded.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    checkpoint.save_rank_checkpoint(str(tmp_path / "files"), model, optimizer)
    checkpoint.load_rank_checkpoint(str(tmp_path / "files"), model, make(model))
    checkpoint.consolidate_sharded_model_checkpoints(str(tmp_path / "files"))
