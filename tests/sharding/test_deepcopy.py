"""``copy.deepcopy`` of a sharded model makes another one, on the same mesh."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import FSDPModule, fully_shard
from tests.sharding.nets import (
    Net,
    assert_same_values,
    batches,
    check_backward,
    loss_of,
    seeded,
    sharded_net,
    train_alike,
)
from tests.worlds import Ranks, on_threads


def _independent(rank: int, world_size: int, when: str, k: bool | int) -> None:
    net, whole = sharded_net(reshard_after_forward=k), seeded(Net)
    if when != "new":
        loss_of(net, batches(world_size)[rank]).backward()
        net.zero_grad()
    if when == "between":
        loss_of(net, batches(world_size)[rank])  # its root stays unsharded
    twin = copy.deepcopy(net)
    assert isinstance(twin, FSDPModule)
    assert type(twin) is type(net)
    for (name, mine), theirs in zip(twin.named_parameters(), net.parameters(), strict=True):
        assert isinstance(mine, DTensor), name
        assert mine is not theirs
        assert mine.device_mesh is theirs.device_mesh
        assert (
            mine.to_local().data_ptr() != theirs.to_local().data_ptr()
            or not mine.to_local().numel()
        )
    train_alike(twin, whole, rank, world_size, steps=2)
    assert all(param.grad is None for param in net.parameters()), "the original is untouched"
    assert_same_values(net, seeded(Net))
    loss_of(twin, batches(world_size)[rank])  # its root stays unsharded
    assert all(isinstance(value, DTensor) for value in twin.state_dict().values())
    twin.load_state_dict(net.state_dict())
    assert_same_values(twin, seeded(Net))


@pytest.mark.parametrize("k", [True, False, 2])
@pytest.mark.parametrize("when", ["new", "later", "between"])
def test_the_copy_trains_by_itself(threads: Ranks, when: str, k: bool | int) -> None:
    threads(_independent, 4 if k == 2 and k is not True else 2, when, k)


@on_threads(2)
def test_a_part_can_be_copied_alone(rank: int, world_size: int) -> None:
    net = sharded_net()
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
    net.blocks[0].set_modules_to_backward_prefetch([net.blocks[2]])
    loss_of(net, batches(world_size)[rank]).backward()
    twin = copy.deepcopy(net.blocks[0])
    whole = copy.deepcopy(seeded(Net).blocks[0])
    x = batches(world_size)
    check_backward(twin, whole, x, rank)
    every = copy.deepcopy(net)
    prefetched = fully_shard.state(every.blocks[0]).forward_prefetch
    assert prefetched == [fully_shard.state(every.blocks[1])], "to the copy, not the original"


@on_threads(2)
def test_ties_stay_ties(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[2].weight
    assert twin[0].weight is not model[0].weight
    loss_of(twin, batches(world_size)[rank]).backward()
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None
