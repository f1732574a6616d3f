"""Switches of ``FSDPModule``: when parameters are gathered and freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.sharding.states import GroupState
from tests.sharding.nets import (
    WIDTH,
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
)
from tests.worlds import on_threads

SHARDED, UNSHARDING, UNSHARDED = GroupState.SHARDED, GroupState.UNSHARDING, GroupState.UNSHARDED


def _states(net: Net) -> list[GroupState]:
    return [group_of(block).state for block in net.blocks]


# -- when parameters are freed -----------------------------------------------------------------


@on_threads(2)
def test_reshard_after_forward(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net, whole = sharded_net(), seeded(Net)
    average_backward(whole, batches(world_size))

    net.set_reshard_after_forward(False)
    loss = loss_of(net, x)
    assert _states(net) == [UNSHARDED] * 3
    loss.backward()
    assert_same_gradients(net, whole)
    net.zero_grad()

    net.set_reshard_after_forward(True)
    loss = loss_of(net, x)
    assert _states(net) == [SHARDED] * 3
    assert group_of(net).state is SHARDED, "the root too, once it is said"
    loss.backward()
    assert_same_gradients(net, whole)

    net.set_reshard_after_forward(False, recurse=False)
    net(x)
    assert group_of(net).state is UNSHARDED
    assert _states(net) == [SHARDED] * 3
    for wrong in (1, None):
        with pytest.raises(ValueError, match="expected a bool"):
            net.set_reshard_after_forward(wrong)


@pytest.mark.parametrize("between", [True, False], ids=["before backward", "after backward"])
@on_threads(4)
def test_a_bool_takes_the_place_of_an_int(rank: int, world_size: int, between: bool) -> None:
    x = batches(world_size)
    net, whole = sharded_net(reshard_after_forward=2), seeded(Net)
    loss = loss_of(net, x[rank])
    assert _states(net) == [GroupState.SHARDED_POST_FORWARD] * 3
    if not between:
        loss.backward()
        loss = torch.zeros(())
    net.set_reshard_after_forward(True)
    if between:
        assert _states(net) == [SHARDED] * 3
        loss.backward()
    for reshards in (True, False):
        net.set_reshard_after_forward(reshards)
        loss = loss_of(net, x[rank])
        assert _states(net) == [SHARDED if reshards else UNSHARDED] * 3
        loss.backward()
    for _ in range(3):
        average_backward(whole, x)
    assert_same_gradients(net, whole)


@on_threads(2)
def test_reshard_after_backward(rank: int, world_size: int) -> None:
    x = batches(world_size)
    net, whole = sharded_net(), seeded(Net)
    net.set_reshard_after_backward(False)
    for sync in (False, True):
        net.set_requires_gradient_sync(sync)
        loss_of(net, x[rank]).backward()
        assert _states(net) == [UNSHARDED] * 3
        assert group_of(net).state is UNSHARDED
        average_backward(whole, x)
    net.set_reshard_after_backward(True, recurse=False)
    run_backward(net, whole, x, rank)
    assert _states(net) == [UNSHARDED] * 3
    assert group_of(net).state is SHARDED
    for module in sharded_modules(net):
        module.reshard()
    assert_same_gradients(net, whole)


@on_threads(2)
def test_unshard_gathers_again_what_a_backward_left(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net, whole = sharded_net(), seeded(Net)
    shards = list(net.parameters())
    net.set_reshard_after_backward(False)
    loss_of(net, x).backward()
    assert _states(net) == [UNSHARDED] * 3
    with torch.no_grad():
        torch._foreach_mul_(shards, 2.0)
        torch._foreach_mul_(list(whole.parameters()), 2.0)
    for module in sharded_modules(net):
        module.unshard()
    assert torch.equal(net(x), whole(x))


# -- what is gathered, when --------------------------------------------------------------------


@on_threads(2)
def test_prefetch(rank: int, world_size: int) -> None:
    net = sharded_net(transport="collectives")  # which gathers literally whenever it could
    first, second, third = net.blocks
    seen: list[list[GroupState]] = []
    for module in (first.up, second.up):
        module.register_forward_hook(lambda *_: seen.append(_states(net)))
    third.up.register_full_backward_hook(lambda *_: seen.append(_states(net)))
    x = batches(world_size)[rank]

    def step() -> list[list[GroupState]]:
        seen.clear()
        loss_of(net, x).backward()
        return list(seen)

    for _ in range(2):
        assert step() == [
            [UNSHARDED, SHARDED, SHARDED],
            [SHARDED, UNSHARDED, SHARDED],
            [SHARDED, UNSHARDING, UNSHARDED],
        ], "forward gathers nothing ahead; backward does, in the order known from forward"

    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([first])
    assert step() == [
        [UNSHARDED, UNSHARDING, UNSHARDING],
        [SHARDED, UNSHARDED, UNSHARDING],
        [UNSHARDING, SHARDED, UNSHARDED],
    ]
    first.set_modules_to_forward_prefetch([third])
    assert step()[0] == [UNSHARDED, SHARDED, UNSHARDING]
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    assert step() == [
        [UNSHARDED, SHARDED, SHARDED],
        [SHARDED, UNSHARDED, SHARDED],
        [SHARDED, UNSHARDING, UNSHARDED],
    ], "an empty list asks for nothing in forward, and means the one before in backward"
    for setter in (first.set_modules_to_forward_prefetch, first.set_modules_to_backward_prefetch):
        with pytest.raises(TypeError, match="found a list of Linear"):
            setter([net.head])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@on_threads(2)
def test_an_embedding_need_not_be_gathered_for_backward(rank: int, world_size: int) -> None:
    net, whole = seeded(Words), seeded(Words)
    fully_shard(net.embedding)
    fully_shard(net)
    net.embedding.set_unshard_in_backward(False)
    net.set_modules_to_backward_prefetch([net.embedding])
    seen: list[GroupState] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: seen.append(group_of(net.embedding).state))

    net.embedding.register_forward_hook(note)
    ids = torch.tensor([[1, 2, 3], [8, 8, 0]])
    for _ in range(2):
        check_backward(net, whole, ids, rank)
    assert seen == [SHARDED] * 2
    net.embedding.set_unshard_in_backward(True)
    loss_of(net, ids[rank]).backward()
    assert seen[-1] is UNSHARDED
