"""Every transport keeps the whole contract, over worlds of one to four ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.base import observe
from shardwise.base.devices import GLOO
from shardwise.transport import buckets, collectives, gloo
from shardwise.transport.base import LocalTransport, Reduce, Transport
from shardwise.transport.collectives import CollectivesTransport, NcclTransport
from shardwise.transport.gloo import GlooTransport
from shardwise.transport.select import select_transport
from tests.harness import run_ranks
from tests.test_observe import Notes
from tests.threads import run_threads, run_transports
from tests.transport.conformance import (
    AllGather,
    AllReduce,
    Checks,
    Item,
    ReduceScatter,
    check_all,
)
from tests.transport.fake import FakeTransport
from tests.transport.streams import fuzz
from tests.worlds import on_processes

CPU = torch.device("cpu")
WORLD_SIZES = [1, 2, 3, 4]
Run = Callable[..., list[Any]]

#: Over the real transports, and over the fake one.
each_kind = pytest.mark.parametrize("run", [run_ranks, run_threads], ids=["processes", "threads"])


def _world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _transports() -> list[Transport]:
    """Those there are for the ranks that ask: processes, or threads."""
    group = _world_group()
    found = select_transport(group, CPU, "auto")
    if isinstance(found, FakeTransport):
        return [found]
    return [found, GlooTransport(group), CollectivesTransport(group, GLOO)]


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
@on_processes()
def test_results_equal_the_reference(rank: int, world_size: int) -> None:
    # Little is large here, so that both ways are taken without many bytes.
    gloo.SMALL_BYTES = gloo.SMALL_ALL_REDUCE_BYTES = collectives.SMALL_BYTES = 2000
    buckets.BLOCK_BYTES = 1000
    group = _world_group()
    check_all(GlooTransport(group), exact=True)
    if world_size > 1:
        check_all(select_transport(group, CPU, "shm"), exact=True)
    check_all(CollectivesTransport(group, GLOO), exact=False)
    check_all(NcclTransport(group, GLOO), exact=False)


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
@on_processes()
def test_random_collectives_waited_for_in_any_order_equal_the_reference(
    rank: int, world_size: int
) -> None:
    gloo.SMALL_BYTES = gloo.SMALL_ALL_REDUCE_BYTES = collectives.SMALL_BYTES = 5000
    buckets.BLOCK_BYTES = 3000
    group = _world_group()
    fuzz(Checks(GlooTransport(group), exact=True), 60, seed=1, largest=5000)
    if world_size > 1:
        fuzz(Checks(select_transport(group, CPU, "shm"), exact=True), 120, seed=4, largest=20000)
    fuzz(Checks(CollectivesTransport(group, GLOO), exact=False), 30, seed=2, largest=2000)
    fuzz(Checks(NcclTransport(group, GLOO), exact=False), 30, seed=3, largest=3000)


@pytest.mark.parametrize("world_size", [2, 3])
@on_processes()
def test_large_tensors_equal_the_reference(rank: int, world_size: int) -> None:
    """Use the thresholds of real trainings."""
    checks = Checks(GlooTransport(_world_group()), exact=True)
    items = [Item(1_000_000), Item(10), Item(300_000, 7, torch.bfloat16, torch.float32)]
    AllGather(checks, items, 1).finish()
    ReduceScatter(checks, items, 1, Reduce.AVG).finish()
    AllReduce(checks, items, 1, Reduce.AVG).finish()


def test_one_rank_alone_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    check_all(LocalTransport(), exact=True)
    fuzz(Checks(LocalTransport(), exact=True), 25, seed=4, largest=1000)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_fake_of_the_tests_keeps_the_same_promises(world_size: int) -> None:
    run_transports(lambda transport: check_all(transport, exact=True), world_size)
    run_transports(
        lambda transport: fuzz(Checks(transport, exact=True), 30, seed=5, largest=1000), world_size
    )


def _gather_into_a_view(rank: int, world_size: int) -> list[list[float]]:
    """Autograd saves views of full parameters: memory that comes and goes must serve them."""
    results = []
    for transport in _transports():
        buffers = transport.full_buffers([200_000 * world_size], [torch.float32], CPU)
        buffers.allocate()
        view = buffers.tensors[0].view(world_size, -1).t()
        for step in range(3):
            buffers.allocate()
            shard = torch.full((200_000,), float(10 * step + rank))
            transport.all_gather([shard], buffers.tensors).wait()
            result = view[0].tolist()
            buffers.free()
        results.append(result)
    return results


@each_kind
def test_views_of_full_tensors_see_what_is_gathered_later(run: Run) -> None:
    for each in run(_gather_into_a_view, 2):
        assert all(row == [20.0, 21.0] for row in each)


def _write_while_it_travels(rank: int, world_size: int) -> None:
    """A shard is written to before its peer, which is late, has received it."""
    for transport in _transports():
        shard = torch.full((1_000_000,), float(rank))
        buffers = transport.full_buffers([world_size * shard.numel()], [shard.dtype], CPU)
        buffers.allocate()
        if rank == 1:
            time.sleep(0.1)
        work = transport.all_gather([shard], buffers.tensors)
        shard.fill_(-1.0)
        work.wait()
        rows = buffers.tensors[0].view(world_size, -1)
        assert [row.unique().tolist() for row in rows] == [[0.0], [1.0]], transport.name


@each_kind
def test_a_gather_takes_a_snapshot_of_the_shards(run: Run) -> None:
    run(_write_while_it_travels, 2)


def _gather_exotic_dtypes(rank: int, world_size: int) -> None:
    for transport in _transports():
        for dtype in (torch.float8_e4m3fn, torch.int16, torch.bool, torch.int64):
            shard = torch.arange(rank, rank + 3).to(dtype)
            full = torch.empty(3 * world_size, dtype=dtype)
            transport.all_gather([shard], [full]).wait()
            expected = torch.cat([torch.arange(r, r + 3).to(dtype) for r in range(world_size)])
            assert torch.equal(full.view(torch.uint8), expected.view(torch.uint8)), dtype


@each_kind
def test_any_dtype_can_be_gathered(run: Run) -> None:
    run(_gather_exotic_dtypes, 2)


@on_processes(2)
def test_every_collective_is_reported_until_it_has_been_waited_for(
    rank: int, world_size: int
) -> None:
    for numel in (10, 1_000_000):
        shard, full = torch.ones(numel), torch.ones(2 * numel)
        for transport in _transports():
            notes = Notes()
            with observe.observing(notes):
                works = [
                    transport.all_gather([shard], [full]),
                    transport.reduce_scatter([full], [shard], Reduce.AVG),
                    transport.all_reduce([shard], Reduce.AVG),
                ]
                for work in works:
                    work.wait()
            collectives = [line.partition(" over")[0] for line in notes.collectives.values()]
            ended = [line for line in notes.lines if line.startswith("end of")]
            assert len(collectives) == 3, transport.name
            assert {f"end of {each}" for each in collectives} <= set(ended), transport.name
            assert not notes.open, transport.name


@on_processes(3)
def test_transports_of_one_group_do_not_mix_messages(rank: int, world_size: int) -> None:
    """Their messages carry the same tags, and are still told apart."""
    one, two = (Checks(GlooTransport(_world_group()), exact=True) for _ in range(2))
    items = [Item(5), Item(100_000)]
    first, second = AllGather(one, items, 1), AllGather(two, items, 2)
    second.finish()
    first.finish()
