"""What readers get is what the model has, whatever its mesh, dtype, runtime and place."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from tests.checkpoint.meshes import NAMES, build, fill, give_state, like, random_setup
from tests.corpus.gathering import wholes
from tests.harness import run_ranks
from tests.weights.names import keep_names_in


def _full(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a model by name, a tied one once, as readers are to get them."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    found = dict(zip(named, wholes(named.values()), strict=True))
    return {
        name: each.to(dtype) if dtype is not None and each.is_floating_point() else each
        for name, each in found.items()
    }


def _assert_read(subscription: shardwise.Subscription, expected: dict[str, Tensor]) -> None:
    found = dict(subscription)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert each.dtype == expected[name].dtype, name
        assert torch.equal(each, expected[name]), name


def _publish_while_it_changes(model: nn.Module, to: str | None, dtype: torch.dtype | None) -> None:
    """Change a model three times, by a little, much and not at all, and read every version."""
    torch.manual_seed(1)  # all ranks change a model alike
    weights = shardwise.publish(model, "policy", to=to, dtype=dtype)
    subscription = shardwise.subscribe("policy", at=to)
    for version, share in enumerate((0.0, 0.02, 1.0, 0.0), 1):
        if version > 1:
            with torch.no_grad():
                for param in model.parameters():
                    change = torch.rand(param.shape) * (torch.rand(param.shape) < share)
                    param.add_(like(param, change))
            assert weights.update() == version
        full = _full(model, dtype)
        _assert_read(subscription, full)
        assert subscription.version == version
        if dist.is_initialized():
            dist.barrier()
    _assert_read(shardwise.subscribe("policy", at=to), _full(model, dtype))  # one that comes late
    if dist.is_initialized():
        dist.barrier()
    weights.close()


def _on_ranks(rank: int, world_size: int, names: str, to: str | None, seed: int) -> None:
    keep_names_in(names)
    draw = random.Random(seed)
    setup = random_setup(draw, world_size, draw.choice(NAMES))
    model, optimizer = build(setup, seed)
    give_state(optimizer)
    fill(model, optimizer)
    _publish_while_it_changes(model, to, draw.choice([None, torch.bfloat16]))


@pytest.mark.parametrize(
    ("seed", "to"),
    [
        pytest.param(seed, to, marks=[pytest.mark.long] * ((seed + at) % 2))
        for seed in range(6)
        for at, to in enumerate([None, "folder"])
    ],
)
def test_readers_get_full_tensors_from_any_mesh(tmp_path: Path, to: str | None, seed: int) -> None:
    folder = None if to is None else str(tmp_path / to)
    run_ranks(_on_ranks, 2 + seed % 3, str(tmp_path / "names"), folder, seed)


@pytest.mark.parametrize("to", [None, "folder"])
def test_a_model_that_is_not_sharded_is_published_without_ranks(
    tmp_path: Path, to: str | None
) -> None:
    folder = None if to is None else str(tmp_path / to)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Embedding(0, 3))
    _publish_while_it_changes(model, folder, torch.float16)


def _tensor_parallel(rank: int, world_size: int, names: str) -> None:
    keep_names_in(names)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shardwise.fully_shard(model, mesh=mesh["dp"])
    _publish_while_it_changes(model, None, None)


def test_what_tensor_parallelism_has_cut_is_put_together(tmp_path: Path) -> None:
    run_ranks(_tensor_parallel, 4, str(tmp_path / "names"))


def _torchs(rank: int, world_size: int, names: str) -> None:
    keep_names_in(names)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    torch_fully_shard(model[0])
    torch_fully_shard(model)
    _publish_while_it_changes(model, None, torch.bfloat16)


def test_a_model_that_torch_has_sharded_is_published(tmp_path: Path) -> None:
    run_ranks(_torchs, 2, str(tmp_path / "names"))
