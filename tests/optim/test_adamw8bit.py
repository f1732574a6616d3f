"""AdamW with moments of eight bits: the same update on every mesh, in a quarter of the memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardwise import checkpoint, fully_shard
from shardwise.optim import AdamW8bit, moments
from tests.ecosystem.llama import full

Ranks = Callable[..., list[Any]]
Threads = Callable[..., list[Any]]

SHAPES = ((48, 300), (40, 1024), (70, 64), (8, 6, 512), (16, 12, 5, 5), (5000,), (9, 30))
STEPS = 3


def weights(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradient(shape: torch.Size, step: int) -> Tensor:
    """Of very different sizes, with zeros."""
    generator = torch.Generator().manual_seed(step)
    sizes = 10.0 ** (-4 * torch.rand(shape, generator=generator))
    return sizes * torch.randn(shape, generator=generator).relu()


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for param in params:
            grad = gradient(param.shape, step).to(param.dtype)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def everything(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters and states, full."""
    states = [value for param in params for _, value in sorted(optimizer.state[param].items())]
    return [full(each.detach()) for each in (*params, *states)]


def plain() -> tuple[list[nn.Parameter], AdamW8bit]:
    params = [nn.Parameter(weight) for weight in weights()]
    return params, AdamW8bit(params, lr=1e-2)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(mine, other), f"tensor {number} of shape {tuple(other.shape)}"


MESHES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(0)]),
    ((4,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((4,), [Shard(-1)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(-1)]),
    ((2, 2), [Shard(1), Shard(1)]),
]


def _on_mesh(
    rank: int, world_size: int, shape: tuple[int, ...], placements: list[Placement]
) -> list[Tensor]:
    mesh = init_device_mesh("cpu", shape)
    params = []
    for weight in weights():
        places = [
            Shard(
                min(each.dim % weight.ndim, weight.ndim - 1)
                if each.dim < 0
                else min(each.dim, weight.ndim - 1)
            )
            if isinstance(each, Shard)
            else each
            for each in placements
        ]
        params.append(nn.Parameter(distribute_tensor(weight, mesh, places)))
    optimizer = AdamW8bit(params, lr=1e-2)
    train(params, optimizer, range(STEPS))
    return everything(params, optimizer)


@pytest.mark.parametrize(("shape", "placements"), MESHES)
def test_the_update_is_the_same_on_any_mesh(
    threads: Threads, shape: tuple[int, ...], placements: list[Placement]
) -> None:
    params, optimizer = plain()
    train(params, optimizer, range(STEPS))
    ranks = 1
    for size in shape:
        ranks *= size
    for found in threads(_on_mesh, ranks, shape, placements):
        assert_same(found, everything(params, optimizer))
