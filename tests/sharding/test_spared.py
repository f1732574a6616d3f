"""Small groups keep their memory from forward to backward, and save a gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardwise.sharding.group_state import GroupState
from shardwise.sharding.hooks import state_of
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    loss_of,
    seeded,
    sharded_net,
)

Ranks = Callable[..., list[Any]]

# There a full parameter without memory has an empty storage.
ON_GLOO = {"SHARDWISE_TRANSPORT": "c10d"}


def _held(net: Net) -> bool:
    """Whether the full parameters of the first block have memory."""
    full = state_of(net.blocks[0]).groups[0].params[0].full
    return full is not None and full.untyped_storage().size() > 0


def _saves_a_gather(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    group = state_of(net.blocks[0]).groups[0]
    gathers: list[str] = []
    transport = type(group.mesh.shard)
    real = transport.all_gather

    def count(self: Any, shards: Any, fulls: Any, label: Any) -> Any:
        gathers.append(label.name)
        return real(self, shards, fulls, label)

    transport.all_gather = count
    for step in range(3):
        x = batches(world_size, step)
        loss = loss_of(net, x[rank])
        assert group.state is GroupState.SHARDED
        assert isinstance(net.blocks[0].up.weight, DTensor), "sharded, for all to see"
        assert _held(net)
        loss.backward()
        assert not _held(net), "nothing is left after a step"
        average_backward(whole, x)
        assert_same_gradients(net, whole)
    names = ["the root group", "blocks.0", "blocks.1", "blocks.2"]
    assert gathers == names * 3, "in forward only"


def test_backward_gathers_nothing(ranks: Ranks) -> None:
    ranks(_saves_a_gather, 2, spares_small_groups=True, env=ON_GLOO)


def _written_to(rank: int, world_size: int) -> None:
    """Between forward and backward the last layer's weights are doubled, as by a user."""
    net = sharded_net(reshard_after_forward=True)
    x = batches(world_size)
    loss = loss_of(net, x[rank])
    weight = net.blocks[2].down.weight
    with torch.no_grad():
        weight.mul_(2)
    loss.backward()

    # The gradient of what comes before passes through the doubled weights.
    other = sharded_net(reshard_after_forward=True)
    loss_of(other, x[rank]).backward()
    mine, theirs = net.blocks[2].up.weight.grad, other.blocks[2].up.weight.grad
    assert mine is not None
    assert theirs is not None
    torch.testing.assert_close(mine.full_tensor(), 2 * theirs.full_tensor())


@pytest.mark.parametrize("spares", [True, False])
def test_a_shard_that_was_written_to_is_gathered_again(ranks: Ranks, spares: bool) -> None:
    ranks(_written_to, 2, spares_small_groups=spares)


def _freed(rank: int, world_size: int) -> None:
    net = sharded_net()
    x = batches(world_size)[rank]
    with torch.no_grad():
        net(x)
    assert not _held(net), "no backward will come"
    loss_of(net, x)
    net.blocks[0].reshard()
    assert not _held(net), "resharding by hand frees"
    loss_of(net, x)
    net.state_dict()
    assert not _held(net), "so do state dicts"
    loss_of(net, x)
    net(x)  # a second forward gathers anew
    loss_of(net, x).backward()
    assert not _held(net)


def test_when_it_is_freed(ranks: Ranks) -> None:
    ranks(_freed, 2, spares_small_groups=True, env=ON_GLOO)


def _counted(rank: int, world_size: int) -> None:
    net = sharded_net(transport="collectives")
    loss_of(net, batches(world_size)[rank])
    assert not _held(net)


def test_those_who_count_collectives_get_every_one(ranks: Ranks) -> None:
    ranks(_counted, 2, spares_small_groups=True)
