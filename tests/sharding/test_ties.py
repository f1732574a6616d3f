"""Parameters that are tied across groups train as they do unsharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise import fully_shard, materialize
from tests.corpus.models import Tied
from tests.sharding.nets import (
    batches,
    check_backward,
    seeded,
)
from tests.worlds import on_threads


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
