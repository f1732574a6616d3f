"""After an exception in forward or backward the model trains on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwise import fully_shard
from shardwise.sharding.states import GroupState
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    hybrid_mesh,
    loss_of,
    seeded,
    sharded_net,
)
from tests.worlds import on_processes, on_threads


class Fails(torch.autograd.Function):
    """The identity, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def _fail(where: str, net: Net, x: torch.Tensor) -> None:
    def raise_error(*_: object) -> None:
        raise ArithmeticError("in forward")

    def wrong_way(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return Fails.apply(output)

    place = net.blocks[1].up
    hook = place.register_forward_hook(raise_error if where == "forward" else wrong_way)
    with pytest.raises(ArithmeticError, match=f"in {where}"):
        loss_of(net, x).backward()
    hook.remove()


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("reset", [False, True], ids=["by itself", "after reset_iter_state"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_threads(2)
def test_the_next_step_is_as_if_nothing_had_been(
    rank: int, world_size: int, where: str, reset: bool, first: bool
) -> None:
    net, whole = sharded_net(), seeded(Net)
    if not first:
        loss_of(net, batches(world_size)[rank]).backward()
        net.zero_grad()
    for _ in range(2):
        _fail(where, net, batches(world_size)[rank])
        if reset:
            net.reset_iter_state()
        elif where == "forward":
            for block in net.blocks:
                assert group_of(block).state is GroupState.SHARDED
        net.zero_grad()
    for step in range(2):
        x = batches(world_size, step)
        check_backward(net, whole, x, rank)


class Loose(nn.Module):
    """A root without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.fails == "forward":
            raise ArithmeticError("in forward")
        x = self.blocks[1](x)
        if self.fails == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, grad: torch.Tensor) -> None:
        raise ArithmeticError("in backward")


@on_threads(2)
def test_a_forward_that_raises_after_a_backward_that_raised_leaves_no_trace(
    rank: int, world_size: int
) -> None:
    """A backward raises, then a forward, each before all modules have had their turn."""
    net, whole = seeded(Loose), seeded(Loose)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    x = torch.full((2, 6), rank + 1.0)
    for net.fails in ("backward", "forward"):
        with pytest.raises(ArithmeticError, match=net.fails):
            net(x).sum().backward()
    net.fails = ""
    net.zero_grad()
    net(x).sum().backward()
    for each in range(world_size):
        (whole(torch.full((2, 6), each + 1.0)).sum() / world_size).backward()
    assert_same_gradients(net, whole)


@on_threads(2)
def test_a_backward_that_raised_may_be_made_again(rank: int, world_size: int) -> None:
    """The same backward once more, after a hook of it raised."""
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)
    failures = [ArithmeticError("in backward")]

    def fail_once(grad: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    def mark(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(fail_once)

    net.blocks[1].register_forward_hook(mark)
    loss = loss_of(net, x[rank])
    with pytest.raises(ArithmeticError, match="in backward"):
        loss.backward(retain_graph=True)
    loss.backward()
    average_backward(whole, x)
    assert_same_gradients(net, whole)


class Careful(nn.Module):
    """Falls back to another branch where the first one raises."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except ArithmeticError:
            x = self.second(x)
        return self.last(x)


@on_threads(2)
def test_gradients_of_a_backward_that_failed_at_its_end_are_lost(
    rank: int, world_size: int
) -> None:
    mesh = hybrid_mesh(world_size)
    net, whole = sharded_net(mesh=mesh, transport="c10d"), seeded(Net)
    fails = [True]

    def hook(flat: torch.Tensor) -> None:
        if fails[0]:
            raise ArithmeticError("in the hook")

    net.blocks[2].set_all_reduce_hook(hook)
    with pytest.raises(ArithmeticError, match="in the hook"):
        loss_of(net, batches(world_size)[rank]).backward()
    fails[0] = False
    net.zero_grad()
    check_backward(net, whole, batches(world_size, 1), rank)


@on_threads(2)
def test_an_exception_that_the_model_itself_handles(rank: int, world_size: int) -> None:
    def raise_error(*_: object) -> None:
        raise ArithmeticError

    twins = [seeded(Careful), seeded(Careful)]
    sharded, whole = twins
    for layer in (sharded.first, sharded.second, sharded.last):
        fully_shard(layer)
    fully_shard(sharded)
    for twin in twins:
        twin.first.register_forward_pre_hook(raise_error)
    for step in range(2):
        x = batches(world_size, step)
        check_backward(sharded, whole, x, rank)


@on_threads(2)
def test_a_step_inside_an_exception_handler_is_no_failure(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)
    try:
        raise ArithmeticError
    except ArithmeticError:
        check_backward(net, whole, x, rank)


@on_threads(2)
def test_the_backward_of_a_backward_is_refused(rank: int, world_size: int) -> None:
    net = sharded_net()
    x = batches(world_size)[rank]
    with pytest.raises(NotImplementedError, match=r"backward\(create_graph=True\)"):
        loss_of(net, x).backward(create_graph=True)
    net.zero_grad()
    whole = seeded(Net)
    loss_of(net, x).backward()
    average_backward(whole, batches(world_size))
    assert_same_gradients(net, whole)


@on_processes(2)
def test_copies_of_saved_tensors_are_refused(rank: int, world_size: int) -> None:
    """They would be made of memory that is freed, and end the process."""
    net, whole = sharded_net(), seeded(Net)
    x = batches(world_size)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        with pytest.raises(NotImplementedError, match=r"Net on rank \d: inside torch\.autograd"):
            net(x[rank])
        with torch.no_grad():
            net(x[rank])  # saves nothing
    check_backward(net, whole, x, rank)


@on_threads(2)
def test_sparse_gradients_are_refused_by_name(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(NotImplementedError, match=r"0\.weight on rank \d: expected a dense"):
        model(torch.tensor([1, 2])).sum().backward()


@on_threads(2)
def test_after_a_step_of_a_pipeline_parameters_are_the_sharded_ones(
    rank: int, world_size: int
) -> None:
    net = sharded_net()
    before = list(net.parameters())
    net.set_is_last_backward(False)  # as a pipeline does before every backward of a step
    net.set_reshard_after_backward(False)
    _fail("backward", net, batches(world_size)[rank])
    net.reset_iter_state()
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
