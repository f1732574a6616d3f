"""What was saved on one mesh loads on any other: random pairs of meshes, models and worlds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardwise import checkpoint, fully_shard
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.disk.pieces import LEAST_BUFFER
from tests.checkpoint.meshes import (
    NAMES,
    Setup,
    build,
    filled,
    give_state,
    random_setup,
    wrong,
)
from tests.corpus.models import EvenBlock
from tests.threads import run_threads

Saved = dict[str, Setup]

WORLDS = (2, 3, 4)
OTHER_SEED = 7


def _save_all(rank: int, world_size: int, saved: Saved, folder: Path) -> None:
    for name, setup in saved.items():
        model, optimizer = filled(setup)
        checkpoint.save(folder / name, model, optimizer, {"setup": name})


def _load_all(
    rank: int, world_size: int, pairs: list[tuple[str, Setup, bool]], folder: Path
) -> list[str]:
    """Load every checkpoint; say what is wrong."""
    found = []
    for name, setup, fresh in pairs:
        model, optimizer = build(setup, seed=OTHER_SEED)
        if not fresh:
            give_state(optimizer)
        extra = checkpoint.load(folder / name, model, optimizer, buffer=LEAST_BUFFER)
        assert extra == {"setup": name}
        found += [f"{name} on {setup}: {each}" for each in wrong(model, optimizer)]
        for group in optimizer.param_groups:
            if group["params"][0].ndim > 1 and group["lr"] != 0.5:
                found.append(f"{name} on {setup}: the options of a group of parameters")
        give_state(optimizer)  # it goes on
    return found


#: By world: each model is saved by one of them, or by all.
ONE = {world_size: NAMES[at::3] for at, world_size in enumerate(WORLDS)}
ALL = dict.fromkeys(WORLDS, NAMES)


@pytest.mark.parametrize(
    ("models", "worlds"), [(ONE, (2, 4)), pytest.param(ALL, WORLDS, marks=pytest.mark.long)]
)
def test_any_mesh_loads_what_any_other_saved(
    tmp_path: Path, models: dict[int, tuple[str, ...]], worlds: tuple[int, ...]
) -> None:
    folder, everything = tmp_path, dict[str, Setup]()
    draw = random.Random(0)
    for world_size, names in models.items():
        mine = {f"{name}-{world_size}": random_setup(draw, world_size, name) for name in names}
        run_threads(_save_all, world_size, mine, folder)
        everything |= mine
    for world_size in worlds:
        draw = random.Random(world_size)
        pairs = [
            (name, random_setup(draw, world_size, setup.model), draw.random() < 0.5)
            for name, setup in everything.items()
        ]
        for found in run_threads(_load_all, world_size, pairs, folder):
            assert not found, "\n".join(found)
    # One process without a group loads it, too.
    pairs = [(name, Setup(setup.model, None), True) for name, setup in everything.items()]
    assert not _load_all(0, 1, pairs, folder)
    for name in everything:  # what ranks hold alike is written once
        manifest = read_manifest(folder / name)
        tensors = sum(entry.nbytes for entry in manifest.tensors)
        pieces = sum(piece.box.numel * e.itemsize for e in manifest.tensors for piece in e.pieces)
        assert pieces == tensors, name


def test_ranks_load_what_one_process_without_a_group_saved(tmp_path: Path) -> None:
    names = ("scalars", "llama-tied")
    _save_all(0, 1, {name: Setup(name, None) for name in names}, tmp_path)
    pairs = [(name, Setup(name, (3,)), True) for name in names]
    for found in run_threads(_load_all, 3, pairs, tmp_path):
        assert not found, "\n".join(found)


# ---- tensor parallelism beside it ----


def _tensor_parallel(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    block = EvenBlock()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(block, mesh=mesh["dp"])


def _save_tensor_parallel(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    block = _tensor_parallel(0)
    checkpoint.save(folder, block)
    values = {name: p for name, p in block.named_parameters() if isinstance(p, DTensor)}
    return {name: p.full_tensor().detach() for name, p in values.items()}


def _load_tensor_parallel(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    block = _tensor_parallel(OTHER_SEED)
    checkpoint.load(folder, block)
    values = {name: p for name, p in block.named_parameters() if isinstance(p, DTensor)}
    return {name: p.full_tensor().detach() for name, p in values.items()}


def test_tensor_parallel_shards_load_as_a_plain_model_and_back(tmp_path: Path) -> None:
    expected = run_threads(_save_tensor_parallel, 4, tmp_path / "parallel")[0]
    torch.manual_seed(OTHER_SEED)
    plain = EvenBlock()
    checkpoint.load(tmp_path / "parallel", plain)
    for name, value in plain.named_parameters():
        assert torch.equal(value, expected[name]), name
    checkpoint.save(tmp_path / "plain", plain)
    for found in run_threads(_load_tensor_parallel, 4, tmp_path / "plain"):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name
