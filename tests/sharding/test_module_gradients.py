"""Switches of ``FSDPModule``: when gradients are reduced, and what their sum is divided by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import MixedPrecisionPolicy, Wire, fully_shard
from tests.sharding.nets import (
    WIDTH,
    Net,
    assert_accumulates,
    assert_same_gradients,
    batches,
    check_backward,
    group_of,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
    twins,
)
from tests.worlds import Ranks, on_threads

# -- when gradients are reduced ----------------------------------------------------------------


@on_threads(2)
def test_either_can_be_switched_off_for_one_group(rank: int, world_size: int) -> None:
    x = batches(world_size)[rank]
    net = sharded_net()
    net.set_requires_gradient_sync(False, recurse=False)
    loss_of(net, x).backward()
    assert net.head.weight.grad is None
    assert net.blocks[0].up.weight.grad is not None

    net = sharded_net(mesh=hybrid_mesh(world_size))
    net.set_requires_all_reduce(False, recurse=False)
    loss_of(net, x).backward()
    assert net.head.weight.grad is None
    assert net.blocks[0].up.weight.grad is not None


class Recomputed(Net):
    """A block that runs twice, and is recomputed each time in a backward inside of the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)  # type: ignore[assignment]
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_gradients_of_a_block_that_is_recomputed_twice_are_all_reduced(
    rank: int, world_size: int
) -> None:
    sharded, whole = twins(Recomputed)
    for step in range(2):
        check_backward(sharded, whole, batches(world_size, step).requires_grad_(), rank)


class Choosy(nn.Module):
    """Two layers of one group, of which a forward may use the first only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


@pytest.mark.parametrize("last_uses_both", [True, False], ids=["all used", "one unused at last"])
@pytest.mark.parametrize(("world_size", "buffers"), [(2, 1), (2, 4), (4, 1)])
@on_threads()
def test_reduce_scatter_now_and_all_reduce_later(
    rank: int, world_size: int, last_uses_both: bool, buffers: int
) -> None:
    net, whole = seeded(Choosy), seeded(Choosy)
    fully_shard(net, mesh=hybrid_mesh(world_size))
    net.set_requires_all_reduce(False)
    net.set_reduce_scatter_max_input_buffers(buffers)
    net.set_is_last_backward(buffers == 1)
    for step in range(2):
        run_backward(net, whole, batches(world_size, step), rank)
        assert all(param.grad is None for param in net.parameters()), "held until the all-reduce"
    net.set_requires_all_reduce(True)
    net.set_is_last_backward(True)
    x = batches(world_size, 2)
    net(x[rank], last_uses_both).square().mean().backward()
    for batch in x:
        (whole(batch, last_uses_both).square().mean() / world_size).backward()
    assert_same_gradients(net, whole)


@on_threads(2)
def test_gradient_sync_switches_both_collectives(rank: int, world_size: int) -> None:
    net = sharded_net(mesh=hybrid_mesh(world_size))
    net.set_requires_all_reduce(False)
    assert_accumulates(net, rank, world_size, lambda: net.set_requires_gradient_sync(True))


@on_threads(2)
def test_reductions_outlive_a_backward_that_is_not_the_last(rank: int, world_size: int) -> None:
    net, whole = sharded_net(), seeded(Net)
    net.set_is_last_backward(False)
    for step in range(3):
        net.set_is_last_backward(step == 2)
        x = batches(world_size, step)
        run_backward(net, whole, x, rank)
        if step == 0:
            assert net.blocks[0].up.weight.grad is None, "the last reduction is still under way"
    assert_same_gradients(net, whole)


# -- what a sum of gradients is divided by -----------------------------------------------------


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64, torch.float16])
@pytest.mark.parametrize("world_size", [1, 2])
@on_threads()
def test_a_factor_of_the_users_takes_the_place_of_the_world_size(
    rank: int, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    net, whole = sharded_net(mp_policy=policy), seeded(Net)
    x = batches(world_size)
    net.set_gradient_divide_factor(4.0)
    for block in net.blocks:
        block.set_gradient_divide_factor(1.0)
    run_backward(net, whole, x, rank)
    for name, param in whole.named_parameters():
        own_group = not name.startswith("blocks")  # the setter is not recursive
        param.grad *= world_size / 4.0 if own_group else world_size
    tolerance = {} if reduce_dtype != torch.float16 else {"rtol": 4e-3, "atol": 1e-3}
    assert_same_gradients(net, whole, **tolerance)
    for wrong in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="expected a positive number"):
            net.set_gradient_divide_factor(wrong)


@on_threads(4)
def test_the_older_name_of_the_factor_still_works_but_warns(rank: int, world_size: int) -> None:
    net = sharded_net(mesh=hybrid_mesh(world_size))
    for module in sharded_modules(net):
        with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
            module.set_reduce_scatter_divide_factor(world_size)
        module.set_requires_all_reduce(False)
    assert_accumulates(net, rank, world_size, lambda: net.set_requires_all_reduce(True))


# -- unused parameters -------------------------------------------------------------------------


@on_threads(2)
def test_parameters_unused_on_one_rank_count_as_zeros(rank: int, world_size: int) -> None:
    net, whole = seeded(Choosy), seeded(Choosy)
    fully_shard(net)
    net.second.bias.requires_grad_(False)
    whole.second.bias.requires_grad_(False)
    x = batches(world_size)
    net(x[rank], both=False).square().mean().backward()
    assert net.second.weight.grad is None, "unused on all ranks: no gradient"
    net.zero_grad()

    net.set_reduce_scatter_unused_params(True)
    net(x[rank], both=rank == 0).square().mean().backward()
    for i, batch in enumerate(x):
        (whole(batch, i == 0).square().mean() / world_size).backward()
    assert_same_gradients(net, whole)
    net.zero_grad()

    net(x[rank], both=False).square().mean().backward()
    assert not net.second.weight.grad.full_tensor().any()
    net.set_reduce_scatter_unused_params(False)
    net.zero_grad()
    net(x[rank], both=False).square().mean().backward()
    assert net.second.weight.grad is None

    outer = fully_shard(nn.Sequential(net))
    outer.set_reduce_scatter_unused_params(True, recurse=False)
    assert not group_of(net).options.reduce_scatter_unused_params


class Experts(nn.Module):
    """Three experts of one size, of which a step runs those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.router(x)
        for i in chosen:
            x = x + self.experts[i](x)
        return x


#: The experts that ranks choose, step by step: nobody ever chooses the last.
CHOICES = [[(0, 1), (1, 2), (), (2,)], [(), (), (), ()], [(), (0,), (1,), ()]]


def _chooses(rank: int, world_size: int, way: str) -> None:
    kwargs: dict[str, Any] = {"mesh": hybrid_mesh(world_size)} if "hybrid" in way else {}
    if "fp16" in way:
        kwargs["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    if "wire" in way:
        kwargs["wire"] = Wire(reduce="int8", error_feedback=True)
    if way in TRANSPORTS or "wire" in way:
        kwargs["transport"] = way if way in TRANSPORTS else "c10d"
    net, whole = seeded(Experts), seeded(Experts)
    fully_shard(net, reshard_after_forward=way != "zero-2", **kwargs)
    accumulates = "accumulated" in way
    off = net.set_requires_all_reduce if "hybrid" in way else net.set_requires_gradient_sync
    if way == "in backward":
        for model in (net, whole):
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(_step)
    for step, choice in enumerate(CHOICES * 2):
        x = batches(world_size, step)
        if accumulates:
            off(step % len(CHOICES) == len(CHOICES) - 1)
        twice = way == "two passes"
        loss = net(x[rank], choice[rank]).square().mean()
        if twice:
            loss = loss + net(loss * x[rank], choice[rank - 1]).square().mean()
        loss.backward()
        losses = []
        for i in range(world_size):
            loss = whole(x[i], choice[i]).square().mean()
            if twice:
                loss = loss + whole(loss * x[i], choice[i - 1]).square().mean()
            losses.append(loss / world_size)
        torch.stack(losses).sum().backward()
        if accumulates and step % len(CHOICES) != len(CHOICES) - 1:
            assert all(param.grad is None for param in net.parameters())
            continue
        _assert_same_gradients(net, whole, way)
        net.zero_grad()
        whole.zero_grad()
        for model in (net, whole):  # nobody's gradient is due any more
            model.get_submodule("experts.0").requires_grad_(step % 2 == 0)


def _step(param: torch.Tensor) -> None:
    assert param.grad is not None
    with torch.no_grad():
        param.sub_(param.grad, alpha=0.1)


def _assert_same_gradients(net: nn.Module, whole: nn.Module, way: str) -> None:
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if "fp16" in way else {}
    if "wire" in way:
        tolerance = {"rtol": 0.0, "atol": 0.03}
    assert_same_gradients(net, whole, **tolerance)


TRANSPORTS = ("shm", "c10d", "collectives")
WAYS = ("zero-3", "zero-2", "fp16", "accumulated", "hybrid", "hybrid accumulated", "two passes")
WIRES = ("wire", "wire accumulated", "hybrid wire")


@pytest.mark.parametrize(
    ("world_size", "way"),
    [
        pytest.param(size, way, marks=pytest.mark.long if (i + j) % 2 else ())  # sizes in turns
        for i, way in enumerate([*WAYS, *WIRES, "in backward"])
        for j, size in enumerate([4, 2])
    ],
)
def test_a_gradient_that_any_rank_has_is_everywhere(
    threads: Ranks, world_size: int, way: str
) -> None:
    threads(_chooses, world_size, way)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_that_any_rank_has_is_everywhere_over(ranks: Ranks, transport: str) -> None:
    ranks(_chooses, 3, transport)
