"""The fake transport finds what a real one lets through, or hangs at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.transport.base import Label, Reduce, Transport
from tests.threads import run_transports
from tests.transport.fake import FakeTransport

CPU = torch.device("cpu")


def _gather(transport: Transport, name: str = "") -> torch.Tensor:
    full = torch.empty(2 * transport.world_size)
    transport.all_gather([torch.full((2,), float(transport.rank))], [full], Label(name)).wait()
    return full


def test_calls_are_logged_in_order_under_the_name_that_the_caller_gave() -> None:
    def each_rank(transport: FakeTransport) -> list[str]:
        _gather(transport, "layers.0")
        transport.all_reduce([torch.ones(1)], Reduce.SUM, Label("layers.1")).wait()
        return [str(call) for call in transport.calls]

    assert run_transports(each_rank, 2) == [["all_gather layers.0", "all_reduce SUM layers.1"]] * 2


def _by_name(transport: FakeTransport) -> None:
    _gather(transport, f"layers.{transport.rank}")


def _by_memory(transport: FakeTransport) -> None:
    one, two = (transport.full_buffers([2], [torch.float32], CPU) for _ in range(2))
    one.allocate()
    _gather(transport)
    two.allocate() if transport.rank else one.free()
    _gather(transport)


@pytest.mark.parametrize("differ", [_by_name, _by_memory])
def test_ranks_that_differ_fail(differ: Callable[[FakeTransport], None]) -> None:
    with pytest.raises(RanksDivergedError):
        run_transports(differ, 2)


def test_a_work_that_failed_stays_failed() -> None:
    def each_rank(transport: FakeTransport) -> None:
        if transport.rank == 0:
            work = transport.all_reduce([torch.ones(1)], Reduce.SUM)
            for _ in range(2):
                with pytest.raises(PeerLostError):
                    work.wait()

    run_transports(each_rank, 2)


def test_what_a_reduction_reads_may_not_change_before_the_wait() -> None:
    def each_rank(transport: FakeTransport) -> None:
        full = torch.ones(4)
        work = transport.reduce_scatter([full], [torch.empty(2)], Reduce.SUM)
        full.zero_()
        work.wait()

    with pytest.raises(AssertionError, match="changed before the wait"):
        run_transports(each_rank, 2)


def test_results_are_not_there_before_the_wait() -> None:
    def each_rank(transport: FakeTransport) -> None:
        buffers = transport.full_buffers([4], [torch.float32], CPU)
        buffers.allocate()
        work = transport.all_gather([torch.ones(2)], buffers.tensors)
        assert buffers.tensors[0].isnan().all()
        work.wait()
        buffers.free()
        buffers.allocate()
        assert buffers.tensors[0].isnan().all()
        shard = torch.zeros(2)
        transport.reduce_scatter([torch.ones(4)], [shard], Reduce.SUM)
        assert shard.isnan().all()

    run_transports(each_rank, 2)
