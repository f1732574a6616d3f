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


def test_it_is_a_transport() -> None:
    assert isinstance(run_transports(lambda transport: transport, 1)[0], Transport)


def test_calls_are_logged_in_order_under_the_name_that_the_caller_gave() -> None:
    def each_rank(transport: FakeTransport) -> list[str]:
        _gather(transport, "layers.0")
        transport.all_reduce([torch.ones(1)], Reduce.SUM, Label("layers.1")).wait()
        return [str(call) for call in transport.calls]

    assert run_transports(each_rank, 2) == [["all_gather layers.0", "all_reduce SUM layers.1"]] * 2


def _by_name(transport: FakeTransport) -> None:
    _gather(transport, f"layers.{transport.rank}")


def _by_kind(transport: FakeTransport) -> None:
    if transport.rank:
        _gather(transport)
    else:
        transport.all_reduce([torch.ones(4)], Reduce.SUM).wait()


def _by_size(transport: FakeTransport) -> None:
    transport.all_reduce([torch.ones(1 + transport.rank)], Reduce.SUM).wait()


def _by_memory(transport: FakeTransport) -> None:
    one, two = (transport.full_buffers([2], [torch.float32], CPU) for _ in range(2))
    one.allocate()
    _gather(transport)
    two.allocate() if transport.rank else one.free()
    _gather(transport)


@pytest.mark.parametrize("differ", [_by_name, _by_kind, _by_size, _by_memory])
def test_ranks_that_differ_fail(differ: Callable[[FakeTransport], None]) -> None:
    with pytest.raises(RanksDivergedError):
        run_transports(differ, 2)


def test_a_rank_that_never_comes_is_named_at_once() -> None:
    def each_rank(transport: FakeTransport) -> None:
        if transport.rank != 1:
            _gather(transport, "layers.0")

    with pytest.raises(
        PeerLostError, match=r"forever in all-gather of layers\.0,.*rank 1 has ended"
    ):
        run_transports(each_rank, 3)


def test_of_several_errors_the_one_behind_the_others_is_raised() -> None:
    def each_rank(transport: FakeTransport) -> None:
        if transport.rank == 1:
            raise KeyError("layers.3.weight")
        _gather(transport)

    with pytest.raises(KeyError, match=r"layers\.3\.weight"):
        run_transports(each_rank, 3)


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


def test_each_rank_draws_random_numbers_as_if_it_were_alone() -> None:
    def each_rank(transport: FakeTransport) -> list[torch.Tensor]:
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(2))
            _gather(transport)
        return drawn

    before = torch.get_rng_state()
    one, two = run_transports(each_rank, 2)
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(before, torch.get_rng_state())
