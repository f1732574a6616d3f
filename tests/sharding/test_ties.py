"""Parameters that are tied across groups train as they do unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, materialize
from tests.corpus.models import Tied
from tests.sharding.nets import (
    batches,
    check_backward,
    seeded,
)
from tests.worlds import Ranks, on_threads


def _shard(model: nn.Module, **kwargs: Any) -> nn.Module:
    for layer in (model.first, model.middle, model.other, model.last):
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


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
