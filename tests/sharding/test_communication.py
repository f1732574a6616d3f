"""Collectives and hooks of the user's own carry a group's bytes; every branch shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import fully_shard
from shardwise.transport.select import select_transport
from tests.sharding.nets import (
    WIDTH,
    Net,
    assert_accumulates,
    assert_same_gradients,
    average_backward,
    batches,
    check_backward,
    group_of,
    hybrid_mesh,
    loss_of,
    run_backward,
    seeded,
    sharded_modules,
    sharded_net,
    train_alike,
)
from tests.worlds import Ranks, on_threads

# -- a hook on gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("force_sum", [False, True], ids=["average", "sum"])
@pytest.mark.parametrize(
    ("world_size", "replicates"), [(1, False), (2, False), (2, True), (4, True)]
)
@on_threads()
def test_a_hook_sees_the_reduced_gradients_before_they_are_divided(
    rank: int, world_size: int, replicates: bool, force_sum: bool
) -> None:
    mesh = hybrid_mesh(world_size) if replicates else None
    net, whole = sharded_net(mesh=mesh), seeded(Net)
    x = batches(world_size)
    seen: list[torch.Tensor] = []
    net.set_force_sum_reduction_for_comms(force_sum)
    net.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
    if replicates:
        net.set_requires_all_reduce(False)
        loss_of(net, x[rank]).backward()
        assert not seen, "there is nothing to see before the all-reduce"
        average_backward(whole, x)
        net.set_requires_all_reduce(True)
    check_backward(net, whole, x, rank)

    (flat,) = seen
    params = group_of(net).params  # of its own group only
    assert flat.shape == (sum(param.layout.chunk_numel for param in params),)
    assert not flat.requires_grad
    scale = world_size if force_sum else 1
    offset = 0
    for param in params:
        grad = param.sharded.grad.to_local().flatten() * scale
        torch.testing.assert_close(flat[offset : offset + grad.numel()], grad, msg=param.fqn)
        offset += param.layout.chunk_numel


@on_threads(2)
def test_no_bytes_are_sent_for_frozen_parameters(rank: int, world_size: int) -> None:
    net, seen = fully_shard(nn.Linear(4, 6)), []
    net.bias.requires_grad_(False)
    net.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    net(torch.ones(1, 4)).sum().backward()
    assert seen == [4 * 6 // world_size]
    assert net.bias.grad is None


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(5, WIDTH))
        self.widest = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.none = nn.Parameter(torch.ones(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        widest = self.narrow.sum() * self.widest.sum() + self.none.sum()
        return x @ self.wide.T * widest


@on_threads(2)
def test_a_hook_may_change_the_gradients(rank: int, world_size: int) -> None:
    net, whole = seeded(TwoDtypes), seeded(TwoDtypes)
    fully_shard(net)
    dtypes: list[torch.dtype] = []

    def double(flat: torch.Tensor) -> None:
        dtypes.append(flat.dtype)
        flat *= 2

    net.set_all_reduce_hook(double)
    x = batches(world_size)
    run_backward(net, whole, x, rank)
    average_backward(whole, x)
    assert set(dtypes) == {torch.bfloat16, torch.float32, torch.float64}, "one call per dtype"
    assert len(dtypes) == 3
    assert_same_gradients(net, whole)


@on_threads(2)
def test_a_stream_for_the_hook_is_for_devices_with_streams_and_1_d_meshes(
    rank: int, world_size: int
) -> None:
    stream = torch.Stream(device="cpu")
    net, seen = fully_shard(nn.Linear(2, 2)), []
    net.set_all_reduce_hook(seen.append, stream=stream)
    net(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1, "where there are no streams, the hook runs in its turn"
    net = fully_shard(nn.Linear(2, 2), mesh=hybrid_mesh(world_size))
    with pytest.raises(ValueError, match="a 2-D mesh takes no stream"):
        net.set_all_reduce_hook(print, stream=stream)
    assert group_of(net).options.all_reduce_hook is None, "what was refused does not stay"


# -- collectives of the user's -----------------------------------------------------------------


class _Comm:
    """Counts what it is asked for."""

    def __init__(self, returns_work: bool) -> None:
        self.returns_work = returns_work
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls: list[dist.ProcessGroup] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated.append((tuple(size), dtype))
        return torch.full(tuple(size), 7, dtype=dtype, device=device)


class Gather(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls.append(group)
        chunks = list(output_tensor.chunk(group.size()))
        work = dist.all_gather(chunks, input_tensor.clone(), group, async_op=self.returns_work)
        return work if self.returns_work else None


class Scatter(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls.append(group)
        summed = input_tensor.clone()
        dist.all_reduce(summed, op, group)
        output_tensor.copy_(summed.chunk(group.size())[group.rank()])
        return _Done() if self.returns_work else None


class _Done:
    def wait(self) -> None:
        pass


def _train_custom(rank: int, world_size: int, make: Any, returns_work: bool, **kwargs: Any) -> None:
    net, whole = seeded(make), seeded(make)
    fully_shard(net, **kwargs)
    gather, scatter = Gather(returns_work), Scatter(returns_work)
    loss_of(net, batches(world_size)[rank]).backward()  # also where it has run before
    net.zero_grad()
    net.set_custom_all_gather(gather)
    net.set_custom_reduce_scatter(scatter)
    train_alike(net, whole, rank, world_size, steps=2)
    mesh = group_of(net).mesh
    dtypes = {param.dtype for param in net.parameters()}
    assert gather.calls == [mesh.shard_group] * 2, "once a forward: the root is not freed"
    assert scatter.calls == [mesh.shard_group] * (2 * len(dtypes)), "once for every dtype"
    wire = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    assert {dtype for _, dtype in gather.allocated} == {wire}


@pytest.mark.parametrize("returns_work", [True, False], ids=["work", "none"])
@pytest.mark.parametrize("make", [Net, TwoDtypes])
def test_custom_collectives_carry_every_byte_of_their_group(
    threads: Ranks, make: Any, returns_work: bool
) -> None:
    threads(_train_custom, 2, make, returns_work)


@on_threads(4)
def test_custom_collectives_of_any_mesh(rank: int, world_size: int) -> None:
    mesh = hybrid_mesh(world_size)
    _train_custom(rank, world_size, Net, True, mesh=mesh)

    # Kept over two of four ranks between forward and backward.
    net, whole = fully_shard(seeded(Net), reshard_after_forward=2), seeded(Net)
    gather = Gather(returns_work=True)
    net.set_custom_all_gather(gather)
    x = batches(world_size)
    for _ in range(2):
        run_backward(net, whole, x, rank)
    assert_same_gradients(net, whole)
    assert [group.size() for group in gather.calls] == [4, 2, 4, 2]

    # Without a dimension that shards there is nothing to gather.
    net = fully_shard(seeded(Net), mesh=init_device_mesh("cpu", (world_size, 1)))
    gather, scatter = Gather(returns_work=False), Scatter(returns_work=False)
    net.set_custom_all_gather(gather)
    net.set_custom_reduce_scatter(scatter)
    net.zero_grad()
    loss_of(net, x[rank]).backward()
    assert not gather.calls
    assert not scatter.calls


@pytest.mark.parametrize("custom", [False, True], ids=["own transport", "custom collectives"])
@on_threads(2)
def test_a_separate_group_to_reduce_in_can_be_switched_on_and_off(
    rank: int, world_size: int, custom: bool
) -> None:
    net, whole = sharded_net(), seeded(Net)
    gather, scatter = Gather(returns_work=True), Scatter(returns_work=True)
    if custom:
        for module in sharded_modules(net):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    own = group_of(net).mesh.shard_group
    x = batches(world_size)

    def step() -> None:
        check_backward(net, whole, x, rank)

    def scatter_groups() -> set[dist.ProcessGroup]:
        if custom:
            scatter.calls.clear()
            step()
            return set(scatter.calls)
        step()
        meshes = [group_of(module).mesh for module in sharded_modules(net)]
        groups = {mesh.scatter_group or mesh.shard_group for mesh in meshes}
        carriers = {select_transport(group, meshes[0].device) for group in groups}
        assert {mesh.scatter for mesh in meshes} == carriers
        return groups

    assert scatter_groups() == {own}
    net.set_separate_reduce_scatter_group()
    (separate,) = scatter_groups()
    assert separate is not own, "one more group, the same for all"
    assert dist.get_process_group_ranks(separate) == dist.get_process_group_ranks(own)
    net.set_separate_reduce_scatter_group(True)
    assert scatter_groups() == {separate}, "a second time changes nothing"
    net.set_separate_reduce_scatter_group(False)
    assert scatter_groups() == {own}
    if custom:
        assert set(gather.calls) == {own}
    other = fully_shard(nn.Linear(2, 2))
    other.set_separate_reduce_scatter_group()
    assert group_of(other).mesh.scatter_group is separate, "models share it, as torch keeps groups"
    net.set_separate_reduce_scatter_group(True, recurse=False)
    assert group_of(net.blocks[0]).mesh.scatter is not group_of(net).mesh.scatter
    step()

    replicated = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (world_size, 1)))
    replicated.set_separate_reduce_scatter_group()
    replicated(torch.ones(1, 2)).sum().backward()
    assert replicated.weight.grad is not None


@on_threads(2)
def test_gradients_not_yet_reduced_survive_a_change_of_transport(
    rank: int, world_size: int
) -> None:
    net = sharded_net()

    def switch() -> None:
        net.set_separate_reduce_scatter_group()
        net.set_requires_gradient_sync(True)

    net.set_requires_gradient_sync(False)
    assert_accumulates(net, rank, world_size, switch)


@on_threads(2)
def test_memory_that_no_gpu_has_tried_is_refused(rank: int, world_size: int) -> None:
    net = fully_shard(nn.Linear(4, 4))
    net.set_allocate_memory_from_process_group_for_comm(False)
    refused = rf"on rank {rank}: not offered until it has run on a GPU"
    with pytest.raises(NotImplementedError, match="set_allocate_memory_from_.*" + refused):
        net.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm " + refused):
        net.set_symm_mem_for_comm()
