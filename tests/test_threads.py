"""Ranks that are threads are a world: process groups, meshes and sharded models work on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.base.errors import PeerLostError
from tests.sharding.nets import Net, batches, group_of, loss_of, sharded_net

Threads = Callable[..., list[Any]]


def _sum_over_ranks(rank: int, world_size: int, scale: float, *, offset: float = 0.0) -> object:
    value = torch.tensor(scale * rank + offset)
    dist.all_reduce(value)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, f"rank {dist.get_rank()}")
    return value.item(), gathered


def test_every_rank_returns_its_own_result(threads: Threads) -> None:
    results = threads(_sum_over_ranks, 3, 10.0, offset=1.0)

    assert results == [(33.0, ["rank 0", "rank 1", "rank 2"])] * 3
    assert not dist.is_initialized()


def _on_a_mesh(rank: int, world_size: int) -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in (0, 1)]


def test_meshes_have_groups_of_their_own(threads: Threads) -> None:
    assert threads(_on_a_mesh, 4) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def _steps_apart(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()


def test_a_rank_that_waits_for_nobody_fails_at_once(threads: Threads) -> None:
    with pytest.raises(PeerLostError, match="rank 1 has ended"):
        threads(_steps_apart, 2)


def _collectives_of_a_step(rank: int, world_size: int) -> list[str]:
    net = sharded_net(lambda: Net(blocks=2))
    loss_of(net, batches(world_size)[rank]).backward()
    return [str(call) for call in group_of(net).mesh.shard.log]


def test_the_collectives_of_a_step_in_order(threads: Threads) -> None:
    one, two = threads(_collectives_of_a_step, 2)

    assert one == two
    assert one == [
        "all_gather the root group",
        "all_gather blocks.0",
        "all_gather blocks.1",
        "all_gather blocks.1",
        "all_gather blocks.0",
        "reduce_scatter AVG blocks.1",
        "reduce_scatter AVG the root group",
        "all_reduce AVG the root group",
        "reduce_scatter AVG blocks.0",
    ]


def _messages(rank: int, world_size: int) -> list[float]:
    left, right = torch.zeros(1), torch.zeros(1)
    if rank == 0:
        for value in (1.0, 2.0, 3.0):
            dist.send(torch.tensor([value]), 1)
        return []
    second = torch.zeros(1)
    works = [dist.irecv(left, 0), dist.irecv(second, 0)]
    for work in reversed(works):  # they arrive in the order in which they were asked for
        work.wait()
    dist.recv(right, 0)
    return [left.item(), second.item(), right.item()]


def test_messages_arrive_in_order(threads: Threads) -> None:
    assert threads(_messages, 2)[1] == [1.0, 2.0, 3.0]
