"""Training a wrapped model beside its unsharded twin, and comparing them bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise import FullyShardedDataParallel, ShardingStrategy
from shardwise.wrap import ModuleWrapPolicy
from tests.corpus.gathering import in_full
from tests.sharding.nets import Block, Net, average_backward, batches, loss_of, seeded

STRATEGIES = list(ShardingStrategy)
BLOCKS = ModuleWrapPolicy({Block})

Make = Callable[[nn.Module], nn.Module]


def wrapped(model: nn.Module | None = None, **arguments: Any) -> FullyShardedDataParallel:
    """A small model whose blocks are units of their own."""
    model = seeded(Net) if model is None else model
    return FullyShardedDataParallel(model, **{"auto_wrap_policy": BLOCKS, **arguments})


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with state, of all parameters."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: nn.Module, rank: int, world_size: int, steps: int = 2) -> torch.optim.Optimizer:
    """Train on this rank's batches."""
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss_of(model, batches(world_size, step)[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def trained_twin(
    world_size: int, steps: int = 2, make: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same training on one process: gradients are averages over all batches."""
    model = seeded(make)
    optimizer = optimizer_of(model)
    for step in range(steps):
        average_backward(model, batches(world_size, step))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_bits(found: nn.Module, expected: nn.Module, where: str = "") -> None:
    """Every parameter has its twin's name and bits."""
    wanted = dict(expected.named_parameters())
    values = {name: in_full(param.detach()) for name, param in found.named_parameters()}
    assert list(values) == list(wanted), where
    differ = [name for name, value in values.items() if not torch.equal(value, wanted[name])]
    assert not differ, f"{where}: {differ} differ from the training on one process"
