"""What all groups under a root share: reductions under way, and an event to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.frontends.fsdp2 import fully_shard
from shardwise.sharding import hooks
from shardwise.sharding.group import ParamGroup
from shardwise.sharding.state import Root, state_of
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    batches,
    check_backward,
    group_of,
    loss_of,
    run_backward,
    seeded,
    sharded_net,
    twins,
)
from tests.worlds import on_threads


def _after_every_group(net: nn.Module, count: Callable[[Root[Any]], int]) -> list[int]:
    """Count something whenever the backward of a group is over, into the list that is returned."""
    root = state_of(net).root
    counts: list[int] = []
    original = root.post_backward

    def counting(group: ParamGroup) -> None:
        original(group)
        counts.append(count(root))

    root.post_backward = counting  # type: ignore[method-assign]
    return counts


@on_threads(2)
def test_more_gradients_may_be_on_their_way_at_once(rank: int, world_size: int) -> None:
    net, whole = twins(lambda: Net(blocks=5))
    x = batches(world_size)
    most = _after_every_group(net, lambda root: len(root.ledger.pending))
    for count in (1, 3):
        net.set_reduce_scatter_max_input_buffers(count)
        most.clear()
        run_backward(net, whole, x, rank)
        assert max(most) == count, f"groups on their way: {most}"
    assert_same_gradients(net, whole)
    net.set_reduce_scatter_max_input_buffers(1, recurse=False)
    assert group_of(net.blocks[0]).options.reduce_scatter_max_input_buffers == 3
    for wrong in (2.0, True, "2"):
        with pytest.raises(TypeError, match="expected an int, found"):
            net.set_reduce_scatter_max_input_buffers(wrong)
    with pytest.raises(ValueError, match="at least 1, found 0"):
        net.set_reduce_scatter_max_input_buffers(0)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_threads(2)
def test_backward_does_not_wait_for_gradients_that_cross_a_network(
    rank: int, world_size: int, transport: str
) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    net, whole = twins(lambda: Net(blocks=5), mesh=mesh, transport=transport)
    root = state_of(net).root
    x = batches(world_size)
    left = _after_every_group(net, lambda root: len(root.ledger.left_alone))
    run_backward(net, whole, x, rank)
    # Gradients over a network are left to it until backward is over; what is in memory is not.
    assert left == ([0, 1, 2, 3, 4, 5] if transport == "c10d" else [0] * 6), left
    assert not root.ledger.left_alone
    assert_same_gradients(net, whole)
    net.set_is_last_backward(False)
    for _ in range(3):
        run_backward(net, whole, x, rank)
    assert max(left) <= 6, f"more than a gradient of each of 6 groups waits: {left}"
    net.set_is_last_backward(True)
    check_backward(net, whole, x, rank)


@on_threads(1)
def test_an_event_behind_the_optimizer_is_for_one_forward(rank: int, world_size: int) -> None:
    net = sharded_net()
    event = _Event()
    net.set_post_optim_event(event)
    root = state_of(net).root
    assert root.post_optim_event is event
    loss_of(net, batches(world_size)[rank]).backward()
    assert root.post_optim_event is None, "waited for by one forward"


class _Event:
    """An event that no ``torch.Stream`` can wait for, such as those of ``torch.cuda``."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@on_threads(1)
def test_the_current_stream_waits_for_an_event_of_any_kind(rank: int, world_size: int) -> None:
    net, event = sharded_net(), _Event()
    state_of(net).device = torch.device("meta")  # anything but a CPU
    net.set_post_optim_event(event)
    with mock.patch.object(hooks, "_to_device", lambda state, tensor: tensor):
        for _ in range(2):
            loss_of(net, batches(world_size)[rank]).backward()
    assert event.waits == 1


class BodyAndHead(nn.Module):
    """Two modules of one group. The root has nothing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class ChunksAndLossInside(BodyAndHead):
    """Runs a backward while the forward of the root runs, and the head on chunks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        if torch.is_grad_enabled():
            hidden.square().mean().backward(retain_graph=True)
        return torch.cat([self.head(chunk) for chunk in hidden.chunk(2)])


@pytest.mark.parametrize("inputs_need_gradients", [True, False])
@on_threads(2)
def test_gradients_of_one_of_several_modules_arrive_with_its_backward(
    rank: int, world_size: int, inputs_need_gradients: bool
) -> None:
    net, whole = seeded(BodyAndHead), seeded(BodyAndHead)
    fully_shard([net.body, net.head])
    root = state_of(fully_shard(net)).root
    x = torch.randn(2, 4, requires_grad=inputs_need_gradients)
    net(x).sum().backward()
    whole(x).sum().backward()
    for number in (2, 3):
        loss = net.head(x).sum()
        assert root.is_in_forward(), "the other module may still come"
        loss.backward()
        whole.head(x).sum().backward()
        assert not root.is_in_forward()
        assert root.forward_number == number
        assert_same_gradients(net, whole)
    for each in (net, whole):
        (each.head(x).sum() + each.head(2 * x).square().sum()).backward()
        each.body(x).sum().backward()
        each(x).sum().backward()
    assert_same_gradients(net, whole)


@on_threads(2)
def test_a_backward_inside_of_a_forward_may_end_before_all_modules_ran(
    rank: int, world_size: int
) -> None:
    net, whole = seeded(ChunksAndLossInside), seeded(ChunksAndLossInside)
    fully_shard([net.body, net.head])
    fully_shard(net)
    for _ in range(2):
        x = torch.randn(2, 4)
        for each in (net, whole):
            each(x).sum().backward()
        assert_same_gradients(net, whole)
