"""Parameters that are tied across groups train as they do unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, materialize
from tests.sharding.nets import (
    assert_same_values,
    batches,
    check_backward,
    seeded,
)
from tests.worlds import Ranks, on_threads


class Tied(nn.Module):
    """The last layer is the first, and a middle one shares its bias with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.other.bias = self.middle.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.middle(self.first(x)).relu()))


def _shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    for layer in (model.first, model.middle, model.other, model.last):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_threads()
def test_training_equals_unsharded_training(rank: int, world_size: int, zero: int) -> None:
    whole = seeded(Tied)
    sharded = _shard(seeded(Tied), reshard_after_forward=zero == 3)
    assert sharded.first.weight is sharded.last.weight
    assert sharded.middle.bias is sharded.other.bias
    assert len(list(sharded.parameters())) == len(list(whole.parameters())) == 4
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, whole)]
    for step in range(2):
        x = batches(world_size, step)
        check_backward(sharded, whole, x, rank)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(sharded, whole)
    assert sharded.first.weight is sharded.last.weight


@on_threads(2)
def test_a_replaced_parameter_is_replaced_everywhere(rank: int, world_size: int) -> None:
    sharded = _shard(seeded(Tied))
    other = _shard(seeded(Tied, seed=1))
    sharded.load_state_dict(other.state_dict(), assign=True)
    assert sharded.first.weight is sharded.last.weight, "one replacement is seen by all groups"
    x = batches(world_size)[rank]
    assert torch.equal(sharded(x), other(x))


@on_threads(2)
def test_materializing(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Tied()
    sharded = _shard(model)

    @torch.no_grad()
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.fill_(0.5)
            if module.bias is not None:
                module.bias.fill_(0.25)

    materialize(sharded, init=init)
    assert sharded.first.weight is sharded.last.weight
    assert torch.equal(sharded.last.weight.full_tensor(), torch.full((6, 6), 0.5))
    whole = seeded(Tied)
    whole.apply(init)
    x = batches(world_size)
    check_backward(sharded, whole, x, rank)


def _meshes(rank: int, world_size: int) -> str:
    model = seeded(Tied)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.first, mesh=mesh)
    with pytest.raises(ValueError, match="is tied to weight, which is sharded over") as caught:
        fully_shard(model.last)
    assert type(model.last) is nn.Linear, "nothing was changed"
    return str(caught.value)


def test_groups_on_different_meshes_are_refused(threads: Ranks) -> None:
    assert "shard both over the same mesh" in threads(_meshes, 4)[0]
