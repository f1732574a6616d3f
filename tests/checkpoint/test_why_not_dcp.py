"""What torch's state dict functions and DCP lose without an error, and what ours do with it.

The rows of the table in ``docs/checkpoints.md``. If a first assertion fails, torch has mended it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import shardwise
from shardwise import FullyShardedDataParallel, StateDictType, checkpoint, fully_shard
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.storage import Writer
from shardwise.optim import local
from shardwise.sharding.placement import full_tensor
from tests.worlds import Ranks

_FULL = StateDictOptions(full_state_dict=True)
_WRAPPED = FullyShardedDataParallel


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _adam(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    _train(model, optimizer, steps)
    return optimizer


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.clone()


def _wrapped_net() -> FullyShardedDataParallel:
    torch.manual_seed(0)
    wrapped = _WRAPPED(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), use_orig_params=True)
    _WRAPPED.set_state_dict_type(wrapped, StateDictType.FULL_STATE_DICT)
    return wrapped


def _strict(rank: int, folder: str) -> None:
    saved = {name: _whole(each) for name, each in _net(1).state_dict().items()}
    del saved["1.weight"]
    model = _net()
    before = _whole(model[1].weight)
    found = set_model_state_dict(
        model, dict(saved), options=StateDictOptions(full_state_dict=True, strict=True)
    )
    assert not found.missing_keys
    assert torch.equal(_whole(model[1].weight), before), "it was not loaded"

    if rank == 0:
        torch.save(saved, f"{folder}/a.pt")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"1\.weight is not in the checkpoint"):
        checkpoint.load_weights(f"{folder}/a.pt", model)
    wrapped = _wrapped_net()
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.weight"):
        wrapped.load_state_dict(saved)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(3.0))


def _scalars(rank: int, folder: str) -> None:
    model = fully_shard(_Scaled())
    writer = HuggingFaceStorageWriter(
        f"{folder}/torch", save_distributed=True, enable_consolidation=True
    )
    dcp.save(dict(model.state_dict()), storage_writer=writer)
    read = {"scale": torch.ones(())}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(f"{folder}/torch"))
    assert read["scale"] == 0

    checkpoint.save_hf(f"{folder}/ours", model)
    with torch.no_grad():
        model.scale.zero_()
    checkpoint.load_weights(f"{folder}/ours", model)
    assert _whole(model.scale) == 3


def _keys(rank: int, folder: str) -> None:
    dcp.save({"losses": {100: 2.5}}, checkpoint_id=f"{folder}/torch")
    read = {"losses": {100: 0.0}}
    dcp.load(read, checkpoint_id=f"{folder}/torch")
    assert read["losses"] == {100: 0.0, "100": 2.5}
    if rank == 0:
        dcp_to_torch_save(f"{folder}/torch", f"{folder}/torch.pt")
        assert torch.load(f"{folder}/torch.pt") == {"losses": {"100": 2.5}}
    model = _net()
    optimizer = _adam(model)
    optimizer.state[model[0].weight]["seen"] = {7: 1}
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    set_optimizer_state_dict(model, optimizer, state, options=flat)
    assert optimizer.state[model[0].weight]["seen"] == {"7": 1}

    optimizer.state[model[0].weight]["seen"] = {7: 1}
    checkpoint.save(f"{folder}/ours", model, optimizer, {"losses": {100: 2.5}})
    assert checkpoint.load(f"{folder}/ours", model, optimizer) == {"losses": {100: 2.5}}
    assert optimizer.state[model[0].weight]["seen"] == {7: 1}
    with pytest.raises(CheckpointError, match=r"extra.many\[1\]: found torch.Tensor, expected"):
        checkpoint.save(f"{folder}/x", model, None, {"many": {1: torch.ones(2)}})
    wrapped = _wrapped_net()
    its = _adam(wrapped)
    its.state[wrapped.module[0].weight]["seen"] = {7: 1}
    named = _WRAPPED.optim_state_dict(wrapped, its)
    assert named["state"]["0.weight"]["seen"] == {7: 1}


def _rates(rank: int, folder: str) -> None:
    def optimizers(model: Any, first: Any, second: Any) -> tuple[torch.optim.Optimizer, ...]:
        fast = {"params": [*first.parameters()], "lr": 0.5}
        slow = {"params": [*second.parameters()], "lr": 0.001}
        return torch.optim.SGD([fast, slow]), torch.optim.SGD([slow, fast])

    def rate_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> float:
        ids = {id(each) for each in module.parameters()}
        groups = (g for g in optimizer.param_groups if {id(p) for p in g["params"]} == ids)
        return float(next(groups)["lr"])

    model = _net()
    saved, other = optimizers(model, model[0], model[1])
    set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, saved))
    assert (rate_of(other, model[0]), rate_of(other, model[1])) == (0.001, 0.5), "swapped"

    saved, other = optimizers(model, model[0], model[1])
    checkpoint.save(f"{folder}/ours", model, saved)
    for group in other.param_groups:
        group["lr"] = 1.0
    checkpoint.load(f"{folder}/ours", model, other)
    assert (rate_of(other, model[0]), rate_of(other, model[1])) == (0.5, 0.001)
    wrapped = _wrapped_net()
    saved, other = optimizers(wrapped, wrapped.module[0], wrapped.module[1])
    named = _WRAPPED.optim_state_dict(wrapped, saved)
    other.load_state_dict(_WRAPPED.optim_state_dict_to_load(wrapped, other, named))
    assert (rate_of(other, wrapped.module[0]), rate_of(other, wrapped.module[1])) == (0.5, 0.001)


def _frozen(rank: int, folder: str) -> None:
    model = _net()
    optimizer = _adam(model)
    weight = model[0].weight
    weight.requires_grad_(False)
    before = _whole(optimizer.state[weight]["exp_avg"])
    checkpoint.save(f"{folder}/ours", model, optimizer)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    assert weight not in optimizer.state, "its moments are gone"

    checkpoint.load(f"{folder}/ours", model, optimizer)
    assert torch.equal(_whole(optimizer.state[weight]["exp_avg"]), before)
    wrapped = _wrapped_net()
    its = _adam(wrapped)
    weight = wrapped.module[0].weight
    weight.requires_grad_(False)
    named = _WRAPPED.optim_state_dict(wrapped, its)
    its.load_state_dict(_WRAPPED.optim_state_dict_to_load(wrapped, its, named))
    assert torch.equal(_whole(its.state[weight]["exp_avg"]), before)


def _other_ranks(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    torch.manual_seed(rank)
    model(torch.randn(16, 4) * (1 + rank))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {n: each.clone() for n, each in model[1].named_buffers()})

    def from_ranks(read: dict[str, Tensor]) -> dict[str, int]:
        return {
            name: next(r for r, held in enumerate(every) if torch.equal(held[name], read[name]))
            for name in every[0]
        }

    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/torch")
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/torch")
    found = from_ranks(dict(model[1].named_buffers()))
    assert found["running_mean"] != found["running_var"], found

    for name, each in model[1].named_buffers():
        each.copy_(every[rank][name])
    with pytest.warns(UserWarning, match=r"model.1.running_mean and 1 more: found a tensor that d"):
        checkpoint.save(f"{folder}/ours", model)
    checkpoint.load(f"{folder}/ours", model)
    assert set(from_ranks(dict(model[1].named_buffers())).values()) == {0}
    for name, each in model[1].named_buffers():
        each.copy_(every[rank][name])
    dcp.save(
        {"model": model.state_dict()},
        storage_writer=Writer(f"{folder}/both"),
        planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
    )
    checkpoint.load(f"{folder}/both", model)
    assert set(from_ranks(dict(model[1].named_buffers())).values()) == {0}
    torch.manual_seed(0)
    wrapped = _WRAPPED(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), use_orig_params=True)
    for name, each in wrapped.module[1].named_buffers():
        each.copy_(every[rank][name])
    full = {n.removeprefix("1."): each for n, each in wrapped.state_dict().items()}
    assert from_ranks(full)["running_mean"] == from_ranks(full)["running_var"] == rank


def _snapshots(rank: int, folder: str) -> None:
    model = _net()
    optimizer = _adam(model)
    weight = model[0].weight
    snapshot = get_optimizer_state_dict(model, optimizer, options=_FULL)["state"]["0.weight"]
    before = _whole(optimizer.state[weight]["exp_avg"])
    handle = checkpoint.async_save(f"{folder}/ours", model, optimizer)
    _train(model, optimizer)
    assert snapshot["step"] == 3, "counts on"
    assert torch.equal(snapshot["exp_avg"], before), "while the moments stay"

    handle.result()
    checkpoint.load(f"{folder}/ours", model, optimizer)
    assert optimizer.state[weight]["step"] == 2
    wrapped = _wrapped_net()
    its = _adam(wrapped)
    named = _WRAPPED.optim_state_dict(wrapped, its)["state"]["0.weight"]
    _train(wrapped, its)
    assert named["step"] == 2


def _getters(rank: int, folder: str) -> None:
    def moved(look: Callable[[nn.Module, torch.optim.Optimizer], object]) -> float:
        model = _net()
        optimizer = local(torch.optim.Rprop, model.parameters())
        before = _whole(model[0].weight)
        look(model, optimizer)
        _train(model, optimizer)
        return float((_whole(model[0].weight) - before).abs().mean())

    expected = moved(lambda model, optimizer: None)
    assert moved(get_optimizer_state_dict) < expected / 5000

    assert moved(lambda *both: checkpoint.save(f"{folder}/a", *both)) == expected
    assert moved(lambda *both: checkpoint.async_save(f"{folder}/b", *both).result()) == expected
    assert moved(lambda *both: checkpoint.save_rank_checkpoint(f"{folder}/c", *both)) == expected
    wrapped = _wrapped_net()
    its = torch.optim.Adam(wrapped.parameters())
    assert _WRAPPED.optim_state_dict(wrapped, its)["state"] == {}
    assert not its.state


def _partial(rank: int, folder: str) -> None:
    model = _net()
    optimizer = _adam(model)
    weight = model[1].weight
    state = get_optimizer_state_dict(model, optimizer)
    del state["state"]["1.weight"], state["state"]["1.bias"]  # type: ignore[attr-defined]
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    assert weight not in optimizer.state, "what it had is gone"

    optimizer = _adam(model)
    before = _whole(optimizer.state[weight]["exp_avg"])
    first = torch.optim.Adam(model[0].parameters())
    checkpoint.save(f"{folder}/part", nn.Sequential(model[0]), first)
    with pytest.raises(CheckpointError, match=r"found no group among the 1 saved ones"):
        checkpoint.load(f"{folder}/part", model, optimizer, strict=False)
    assert torch.equal(_whole(optimizer.state[weight]["exp_avg"]), before)
    kept = _whole(weight)
    checkpoint.load(f"{folder}/part", model, strict=False)
    assert torch.equal(_whole(weight), kept)


_ROWS = {
    "strict": _strict,
    "scalars": _scalars,
    "keys": _keys,
    "rates": _rates,
    "frozen": _frozen,
    "other ranks": _other_ranks,
    "snapshots": _snapshots,
    "getters": _getters,
    "partial": _partial,
}


def _shows(rank: int, world_size: int, row: str, folder: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        _ROWS[row](rank, folder)


@pytest.mark.parametrize("row", _ROWS)
def test_what_torch_loses_is_kept(ranks: Ranks, tmp_path: Path, row: str) -> None:
    ranks(_shows, 3, row, str(tmp_path))


def _saves_again(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 12, bias=False))
    with torch.no_grad():
        model.weight.fill_(world_size)
    writer = HuggingFaceStorageWriter(f"{folder}/torch", save_distributed=True)
    dcp.save(dict(model.state_dict()), storage_writer=writer)
    if world_size == 3:
        checkpoint.save_hf(f"{folder}/hf", model)
        checkpoint.save(f"{folder}/ours", model)
        return
    for write in (checkpoint.save_hf, checkpoint.save):
        name = "hf" if write is checkpoint.save_hf else "ours"
        with pytest.raises(CheckpointError, match="exists"):
            write(f"{folder}/{name}", model)


def test_a_folder_is_not_saved_to_again_with_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_saves_again, 3, str(tmp_path))
    ranks(_saves_again, 2, str(tmp_path))
    read = {"weight": torch.zeros(12, 4)}
    reader = HuggingFaceStorageReader(str(tmp_path / "torch"))
    listed = reader.fs.ls
    reader.fs.ls = lambda path: sorted(listed(path))  # a file system lists in any order
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(read, storage_reader=reader)
    assert set(read["weight"].unique().tolist()) == {2.0, 3.0}, "of both saves"


def test_no_door_of_ours_calls_the_functions_that_lose_something() -> None:
    torchs = re.compile(r"\b[gs]et_(model_|optimizer_)?state_dict\b")
    sources = [each.read_text() for each in Path(shardwise.__file__).parent.rglob("*.py")]
    found = {
        node.id
        for source in filter(torchs.search, sources)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name)
    }
    assert not list(filter(torchs.fullmatch, found))
