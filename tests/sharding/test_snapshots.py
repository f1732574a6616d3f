"""Full parameters are what the shards held when they were gathered, whatever is written later."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard, materialize
from shardwise.base import libc
from shardwise.sharding.state import state_of
from tests.sharding.nets import (
    Net,
    batches,
    loss_of,
    seeded,
    shard_blocks,
    sharded_net,
    train_alike,
)
from tests.worlds import Ranks, on_processes

pytestmark = pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")


@pytest.mark.parametrize("world_size", [2, 3])
@on_processes()
def test_views_of_shards_stay_valid(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    views = {name: param.to_local() for name, param in net.named_parameters()}
    train_alike(net, whole, rank, world_size)
    for name, param in net.named_parameters():
        assert torch.equal(views[name], param.to_local()), f"{name}: a view from before training"


@pytest.mark.parametrize("how", ["meta", "assign", "dtype", "materialize"])
@on_processes(2)
def test_shards_may_be_replaced(rank: int, world_size: int, how: str) -> None:
    whole = seeded(Net)
    net = sharded_net()
    if how == "meta":
        with torch.device("meta"):
            net = Net()
        shard_blocks(net)
        net.to_empty(device="cpu")
        reference = sharded_net().state_dict()
        net.load_state_dict(reference)
    elif how == "assign":
        state = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
    elif how == "dtype":
        net.to(torch.float64).to(torch.float32)
    elif how == "materialize":
        with torch.device("meta"):
            net = nn.Linear(6, 6)
        fully_shard(net, reshard_after_forward=True)
        torch.manual_seed(0)
        materialize(net)
        whole = seeded(lambda: nn.Linear(6, 6))
    train_alike(net, whole, rank, world_size)


class _Clamped(nn.Module):
    """Changes its own weight in forward, past autograd's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 36).view(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        return x @ self.weight


def _changes_its_weight(rank: int, world_size: int, transport: str) -> list[torch.Tensor]:
    net = sharded_net(_Clamped, transport=transport, reshard_after_forward=True)
    seen = []
    for step in range(2):
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


@pytest.mark.parametrize("grad", [False, True])
@on_processes(2)
def test_shards_may_be_written_to_as_soon_as_a_forward_returns(
    rank: int, world_size: int, grad: bool
) -> None:
    net, whole = sharded_net(_Slow), seeded(_Slow)
    net.seconds = 0.01 * rank
    x = batches(world_size)[rank]
    for _ in range(5):
        with torch.set_grad_enabled(grad):
            found = net(x)
        torch.testing.assert_close(found, whole(x), msg="another rank wrote while this one read")
        with torch.no_grad():
            for param in (*net.parameters(), *whole.parameters()):
                param.mul_(0.5)


@on_processes(2)
def test_shards_may_be_written_to_as_soon_as_a_reshard_returns(rank: int, world_size: int) -> None:
    net = sharded_net(_Slow)
    before = net.head.weight.full_tensor().detach().clone()
    net.unshard()
    time.sleep(0.05 * rank)
    assert torch.equal(net.head.weight, before)
    net.reshard()
    with torch.no_grad():
        net.head.weight.zero_()


@on_processes(2, pg_timeout=5)
def test_a_forward_that_gathers_nothing_waits_for_nobody(rank: int, world_size: int) -> None:
    net, whole = sharded_net(reshard_after_forward=False), seeded(Net)
    for module in net.modules():
        if state_of(module) is not None:
            module.unshard()
    if rank == 0:  # nothing is gathered, so nobody need be waited for
        with torch.no_grad():
            x = batches(1)[0]
            torch.testing.assert_close(net(x), whole(x))


@on_processes(4)
def test_replicas_have_their_own(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net, whole = sharded_net(mesh=mesh), seeded(Net)
    train_alike(net, whole, rank, world_size)


class _Late(torch.autograd.Function):
    """The identity, which takes its time in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class _LateNet(Net):
    """A net that is slow in forward and backward, block by block, on one rank."""

    forward_seconds = backward_seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            time.sleep(self.forward_seconds)
            x = _Late.apply(block(x), self.backward_seconds)
        return self.head(x) * self.gain


def _zero(net: nn.Module) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()


def _input_gradient(net: nn.Module, x: torch.Tensor, how: str) -> torch.Tensor:
    x = x.clone().requires_grad_()
    if how == "grad":
        return torch.autograd.grad(net(x).sum(), x)[0]
    net.requires_grad_(how != "frozen")
    net(x).sum().backward()
    assert x.grad is not None
    return x.grad


def _reads_on(rank: int, world_size: int, how: str, reshard: bool | None) -> None:
    x = batches(world_size)[rank]
    net, whole = sharded_net(_LateNet, reshard_after_forward=reshard), seeded(_LateNet)
    if how == "no sync":
        net.set_requires_gradient_sync(False)
    if how == "evaluations":
        with torch.no_grad():
            expected = whole(x)
            net(x)
            net.forward_seconds = 0.02 * rank
            found = net(x)
            _zero(net)
    else:
        expected = _input_gradient(whole, x, how)
        _input_gradient(net, x, how)
        net.backward_seconds = 0.02 * rank
        found = _input_gradient(net, x, how)
        _zero(net)
    torch.testing.assert_close(found, expected, msg="another rank wrote while this one read")


@pytest.mark.parametrize("reshard", [None, False])
@on_processes(2)
def test_no_rank_writes_while_another_reads_however_it_reads(
    rank: int, world_size: int, reshard: bool | None
) -> None:
    for how in ("evaluations", "grad", "frozen", "no sync"):
        _reads_on(rank, world_size, how, reshard)


def _writes_before_backward(rank: int, world_size: int, transport: str) -> list[torch.Tensor]:
    """A step that comes between a forward and its backward, and one past autograd's sight."""
    found = []
    for reshard in (None, False):
        net = sharded_net(_LateNet, reshard_after_forward=reshard, transport=transport)
        shards = list(net.parameters())
        x = batches(world_size)[rank].requires_grad_()
        out = net(x)
        with torch.no_grad():
            for param in shards:
                param.mul_(2.0)
        out.sum().backward()
        found.append(x.grad)
        with torch.no_grad():
            net(x)
            for param in shards:
                param.data.mul_(1.0 + rank)
            found.append(net(x))
    net = sharded_net(_LateNet, transport=transport)
    for module in net.modules():
        if state_of(module) is not None:
            module.unshard()
    weight = net.blocks[0].up.weight
    _zero_shards(net)
    found.append(weight.detach().clone())
    return found


def _zero_shards(net: nn.Module) -> None:
    for module in net.modules():
        state = state_of(module)
        for group in state.groups if state is not None else ():
            for param in group.params:
                param.local.zero_()


def test_what_stays_unsharded_keeps_its_values_as_with_memory_of_its_own(ranks: Ranks) -> None:
    for shared, own in zip(
        ranks(_writes_before_backward, 2, "shm"),
        ranks(_writes_before_backward, 2, "c10d"),
        strict=True,
    ):
        for mine, theirs in zip(shared, own, strict=True):
            torch.testing.assert_close(mine, theirs)


@on_processes(2)
def test_views_of_a_copied_model_stay_valid(rank: int, world_size: int) -> None:
    net = copy.deepcopy(sharded_net())
    views = [param.to_local() for param in net.parameters()]
    with torch.no_grad():
        x = batches(world_size)[rank]
        net(x)
        for view in views:
            view.zero_()
        net.reshard()
        assert net(x).abs().max() == 0, "views of a copied model are of its parameters"
