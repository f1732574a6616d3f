"""Shards that are parts of full parameters which the ranks of one host have in common."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, materialize
from shardwise.sharding.hooks import state_of
from shardwise.transport import futex
from tests.sharding.nets import (
    Net,
    assert_same_gradients,
    assert_same_values,
    average_backward,
    batches,
    loss_of,
    seeded,
)

Ranks = Callable[..., list[Any]]
pytestmark = pytest.mark.skipif(not futex.is_available(), reason="needs Linux on x86-64")


def _sharded(make: Callable[[], nn.Module] = Net, **kwargs: Any) -> nn.Module:
    net = seeded(make)
    for block in getattr(net, "blocks", ()):
        fully_shard(block, **kwargs)
    return fully_shard(net, **kwargs)


def _in_common(net: nn.Module) -> set[str]:
    """The parameters whose shards are parts of a common full parameter, where they live."""
    found = set()
    for module in net.modules():
        state = state_of(module)
        for group in state.groups if state is not None else ():
            for param in group.params:
                common = param.form.common
                rows = param.local.numel()
                if common is not None and (
                    rows == 0 or common.chunk(rows).data_ptr() == param.local.data_ptr()
                ):
                    found.add(param.fqn)
    return found


def _train(net: nn.Module, whole: nn.Module, rank: int, world_size: int, steps: int = 3) -> None:
    mine = torch.optim.AdamW(net.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for step in range(steps):
        x = batches(world_size, step)
        loss_of(net, x[rank]).backward()
        average_backward(whole, x)
        assert_same_gradients(net, whole)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(net, whole)


def _from_the_start(rank: int, world_size: int) -> None:
    net, whole = _sharded(), seeded(Net)
    views = {name: param.to_local() for name, param in net.named_parameters()}
    assert _in_common(net) >= {"up.weight", "down.weight"}
    _train(net, whole, rank, world_size)
    for name, param in net.named_parameters():
        assert torch.equal(views[name], param.to_local()), f"{name}: a view from before training"


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_live_there_before_anybody_can_have_views_of_them(
    ranks: Ranks, world_size: int
) -> None:
    ranks(_from_the_start, world_size)


def _moved(rank: int, world_size: int, how: str) -> None:
    whole = seeded(Net)
    net = _sharded()
    if how == "meta":
        with torch.device("meta"):
            net = Net()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        net.to_empty(device="cpu")
        reference = _sharded().state_dict()
        net.load_state_dict(reference)
    elif how == "assign":
        state = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
    elif how == "dtype":
        net.to(torch.float64).to(torch.float32)
    elif how == "deepcopy":
        net = copy.deepcopy(net)
    elif how == "materialize":
        with torch.device("meta"):
            net = nn.Linear(6, 6)
        fully_shard(net)
        torch.manual_seed(0)
        materialize(net)
        whole = seeded(lambda: nn.Linear(6, 6))
    _train(net, whole, rank, world_size)
    assert _in_common(net), "they move there at the first gather"


@pytest.mark.parametrize("how", ["meta", "assign", "dtype", "deepcopy", "materialize"])
def test_shards_that_came_later_move_there(ranks: Ranks, how: str) -> None:
    ranks(_moved, 2, how)


class _Clamped(nn.Module):
    """Changes its own weight in forward, past autograd's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 36).view(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        return x @ self.weight


def _changes_its_weight(rank: int, world_size: int, transport: str) -> list[torch.Tensor]:
    net = _sharded(_Clamped, transport=transport, reshard_after_forward=True)
    seen = []
    for step in range(3):
        loss = loss_of(net, batches(world_size, step)[rank])
        loss.backward()
        seen += [loss.detach(), net.weight.grad.full_tensor(), net.weight.full_tensor().detach()]
    return seen


def test_a_module_that_writes_to_its_weight_does_so_as_with_memory_of_its_own(
    ranks: Ranks,
) -> None:
    for shared, own in zip(
        ranks(_changes_its_weight, 2, "shm"), ranks(_changes_its_weight, 2, "c10d"), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(shared, own, strict=True))


class _Slow(Net):
    """A net whose forward takes long on one rank."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            time.sleep(self.seconds)
            x = block(x)
        return self.head(x) * self.gain


def _writes_at_once(rank: int, world_size: int, grad: bool) -> None:
    net, whole = _sharded(_Slow), seeded(_Slow)
    net.seconds = 0.01 * rank
    x = batches(world_size)[rank]
    for _ in range(5):
        with torch.set_grad_enabled(grad):
            found = net(x)
        torch.testing.assert_close(found, whole(x), msg="another rank wrote while this one read")
        with torch.no_grad():
            for param in (*net.parameters(), *whole.parameters()):
                param.mul_(0.5)


@pytest.mark.parametrize("grad", [False, True])
def test_shards_may_be_written_to_as_soon_as_a_forward_returns(ranks: Ranks, grad: bool) -> None:
    ranks(_writes_at_once, 2, grad)


def _writes_after_reshard(rank: int, world_size: int) -> None:
    net = _sharded(_Slow)
    before = net.head.weight.full_tensor().detach().clone()
    net.unshard()
    time.sleep(0.05 * rank)
    assert torch.equal(net.head.weight, before)
    net.reshard()
    with torch.no_grad():
        net.head.weight.zero_()


def test_shards_may_be_written_to_as_soon_as_a_reshard_returns(ranks: Ranks) -> None:
    ranks(_writes_after_reshard, 2)


def _alone(rank: int, world_size: int) -> None:
    net, whole = _sharded(reshard_after_forward=False), seeded(Net)
    for module in net.modules():
        if state_of(module) is not None:
            module.unshard()
    if rank == 0:  # nothing is gathered, so nobody need be waited for
        with torch.no_grad():
            x = batches(1)[0]
            torch.testing.assert_close(net(x), whole(x))


def test_a_forward_that_gathers_nothing_waits_for_nobody(ranks: Ranks) -> None:
    ranks(_alone, 2, pg_timeout=5)


def _hybrid(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, whole = _sharded(mesh=mesh), seeded(Net)
    _train(net, whole, rank, world_size)
    assert _in_common(net)


def test_replicas_have_their_own(ranks: Ranks) -> None:
    ranks(_hybrid, 4)
