"""Hosts of several ranks each: once over the link. The contract with a wire: test_encoded.py."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardwise.base import libc
from shardwise.base.errors import RanksDivergedError
from shardwise.transport.base import Call, Kind, Label, Reduce, Transport
from shardwise.transport.carrier import ranks_per_host
from shardwise.transport.codecs import BLOCK
from shardwise.transport.encoded import EncodedTransport
from shardwise.transport.select import ChannelOptions, compose
from shardwise.transport.two_levels import TwoLevelTransport
from shardwise.transport.wire import PLAIN, Wire
from tests.harness import run_ranks
from tests.threads import on_hosts, run_threads
from tests.transport.conformance import Checks, check_cases
from tests.transport.encoded import (
    CPU,
    FEEDBACK,
    INT8,
    MIXED,
    SHARE,
    Source,
    check_contract,
    on_host,
    values_of,
)
from tests.transport.fake import FakeTransport
from tests.transport.streams import fuzz

LABEL = Label("group")


def over_world(wire: Wire, requested: str = "c10d") -> TwoLevelTransport:
    """The transport of all ranks, on several hosts."""
    found = compose(dist.group.WORLD, CPU, ChannelOptions(requested, wire))
    assert isinstance(found, TwoLevelTransport)
    return found


def on_hosts_of(local: int, fn: Any, world_size: int, *args: Any) -> list[Any]:
    """Run a function on ranks, so many of them on each host."""
    with on_hosts([str(rank // local) for rank in range(world_size)]):
        return run_threads(fn, world_size, *args)


# -- which ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("abc", 1),
        ("aaaa", 4),
        ("aab", None),  # one has more
        ("abab", None),  # they take turns
        ("abba", None),
        ("aabbaa", None),  # one has two rows
        ("aabbb", None),
    ],
)
def test_hosts_are_even_if_each_has_as_many_ranks_in_a_row(
    names: str, expected: int | None
) -> None:
    assert ranks_per_host(names) == expected


def _kind(rank: int, world_size: int) -> type[Transport]:
    return type(compose(dist.group.WORLD, CPU, ChannelOptions("c10d", INT8)))


@pytest.mark.parametrize("names", ["abc", "aaaa", "aab", "abab"])
def test_other_ranks_have_one_level(names: str) -> None:
    with on_hosts(list(names)):
        assert set(run_threads(_kind, len(names))) == {EncodedTransport}


def _shared(rank: int, world_size: int) -> None:
    one = over_world(INT8)
    assert over_world(INT8) is one
    other = over_world(FEEDBACK)
    assert other is not one
    assert (one.rank, one.world_size) == (rank, world_size)


def _plain_kind(rank: int, world_size: int, requested: str) -> type[Transport]:
    return type(compose(dist.group.WORLD, CPU, ChannelOptions(requested)))


@pytest.mark.parametrize(
    ("names", "requested", "has_two"),
    [
        ("aabb", "auto", True),
        ("aabbcc", "auto", True),
        ("aabb", "c10d", False),  # from each rank to each
        ("abc", "auto", False),
        ("aaaa", "auto", False),
        ("aab", "auto", False),
        ("abab", "auto", False),
    ],
)
def test_messages_without_a_wire_have_two_levels_if_hosts_are_even(
    names: str, requested: str, has_two: bool
) -> None:
    with on_hosts(list(names)), patch.object(FakeTransport, "sends_to_each", True):
        kinds = set(run_threads(_plain_kind, len(names), requested))
    assert {kind is TwoLevelTransport for kind in kinds} == {has_two}


def test_groups_of_parameters_share_a_transport() -> None:
    on_hosts_of(2, _shared, 4)


def _dropped(rank: int, world_size: int) -> torch.Tensor:
    """Calls that nobody waits for, on some ranks, in other orders than those of the calls."""
    transport = over_world(INT8)
    shard, fulls = torch.full((300,), 1.0 + rank), torch.empty(3, 300 * world_size)
    works = [transport.all_gather([shard], [full], LABEL) for full in fulls]
    grads = torch.full((300 * world_size,), 1.0)
    reduced = transport.reduce_scatter([grads], [torch.empty(300)], Reduce.SUM, LABEL)
    if rank % 3:
        works[rank - 1].wait()
    if rank != 2:
        reduced.wait()
    last = torch.empty(300 * world_size)
    transport.all_gather([shard], [last], LABEL).wait()
    return last


def test_a_rank_completes_what_it_does_not_wait_for() -> None:
    first, *others = on_hosts_of(2, _dropped, 4)
    expected = torch.arange(1.0, 5.0).repeat_interleave(300)
    torch.testing.assert_close(first, expected)
    assert all(torch.equal(first, other) for other in others)


# -- sums ------------------------------------------------------------------------------------------


def _plain_contract(rank: int, world_size: int) -> None:
    checks = Checks(over_world(PLAIN.common, "auto"), exact=False)
    check_cases(checks)
    fuzz(checks, 8, seed=3, largest=3000)


@pytest.mark.parametrize(
    ("local", "world_size"),
    [(2, 4), (3, 6), pytest.param(2, 6, marks=pytest.mark.long)],
)
def test_messages_without_a_wire_keep_the_contract(local: int, world_size: int) -> None:
    with patch.object(FakeTransport, "sends_to_each", True):
        on_hosts_of(local, _plain_contract, world_size)


def _added(rank: int, world_size: int, op: Reduce) -> tuple[torch.Tensor, torch.Tensor]:
    numel = 50
    full, shard = values_of(rank, world_size * numel), torch.empty(numel)
    transport = over_world(PLAIN.common, "auto")
    transport.reduce_scatter([full], [shard], op, LABEL).wait()
    transport.all_reduce([full], op, LABEL).wait()
    return shard, full


@pytest.mark.parametrize("op", Reduce)
def test_sums_are_those_of_each_host_and_then_of_hosts(op: Reduce) -> None:
    with patch.object(FakeTransport, "sends_to_each", True):
        found = on_hosts_of(2, _added, 4, op)
    a, b, c, d = (values_of(rank, 200) for rank in range(4))
    expected = (a + b) + (c + d)
    if op is Reduce.AVG:
        expected /= 4
    for rank, (shard, full) in enumerate(found):
        assert torch.equal(shard, expected[50 * rank : 50 * (rank + 1)])
        assert torch.equal(full, expected)


def _scattered(rank: int, world_size: int) -> tuple[float, int]:
    """The mean error of the sum over steps, and the elements for which errors are kept."""
    numel, chunk = 1000, 270  # the last rank has less
    transport, source = over_world(FEEDBACK), Source()
    total, exact = torch.zeros(2, chunk, dtype=torch.float64)
    for step in range(12):
        values = [values_of(each, numel, step) + 0.03 for each in range(world_size)]
        expected = torch.stack(values).double().mean(0)[rank * chunk : (rank + 1) * chunk]
        exact[: len(expected)] += expected
        shard = torch.zeros(chunk)
        transport.start(
            Call(Kind.REDUCE_SCATTER, [values[rank]], [shard], Reduce.AVG, LABEL, of=[source])
        ).wait()
        total[: len(expected)] += shard[: len(expected)]
    kept = sum(each.numel() for each in transport.across._errors.values())
    return float((total - exact).abs().max()), kept


def test_with_feedback_the_sum_over_steps_is_off_by_one_error() -> None:
    found = on_hosts_of(2, _scattered, 4)
    assert all(error <= 2 * SHARE["int8"] * 5 for error, _ in found)
    # Of its own chunk on each host: 270 and 270, and 270 and 190 where the tail is missing.
    assert [kept for _, kept in found] == [540, 460, 540, 460]


def _fp16(rank: int, world_size: int) -> float:
    shard = torch.empty(BLOCK, dtype=torch.float16)
    full = torch.full((world_size * BLOCK,), 40_000.0 if rank < 2 else -39_000.0).half()
    over_world(FEEDBACK).reduce_scatter([full], [shard], Reduce.SUM, LABEL).wait()
    return float(shard[0])


def test_sums_inside_a_host_are_made_in_fp32() -> None:
    for found in on_hosts_of(2, _fp16, 4):  # 80,000 and -78,000, which fp16 does not have
        assert found == pytest.approx(2_000, abs=80_000 / 200)


def _spoiled(rank: int, world_size: int, bad: float) -> tuple[int, list[int]]:
    """The blocks that are counted, and the finite elements of the chunk, then and a step later."""
    transport, source = over_world(FEEDBACK), Source()
    found = []
    for value in (bad, 0.3):
        full = torch.full((world_size * 2 * BLOCK,), 0.3)
        if rank == 3:
            full[5] = value
        shard = torch.empty(2 * BLOCK)
        transport.start(
            Call(Kind.REDUCE_SCATTER, [full], [shard], Reduce.AVG, LABEL, of=[source])
        ).wait()
        found.append(int(shard.isfinite().sum()))
    return transport.overflows, found


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_passes_as_such_and_is_counted_and_not_kept(bad: float) -> None:
    first, *others = on_hosts_of(2, _spoiled, 4, bad)
    assert first == (0, [BLOCK, 2 * BLOCK])
    # Rank 2 sends it: rank 3 has added it up for the host.
    assert others == [(0, [2 * BLOCK] * 2), (1, [2 * BLOCK] * 2), (0, [2 * BLOCK] * 2)]


# -- real processes --------------------------------------------------------------------------------


def _real(rank: int, world_size: int) -> str:
    with on_host(rank, 2):
        for requested in ("c10d", "auto"):
            transport = over_world(MIXED, requested)
            check_contract(transport, 8)
            _interleaved(transport, over_world(INT8, requested))
        plain = over_world(PLAIN.common, "auto")
        fuzz(Checks(plain, exact=False), 8, seed=5, largest=3000)
        _interleaved(plain, transport)
        before = transport.across.all_to_all.bytes_sent
        full, shard = torch.ones(world_size * 64 * BLOCK), torch.empty(64 * BLOCK)
        transport.reduce_scatter([full], [shard], Reduce.AVG, LABEL).wait()
        # Its chunk of the other host, once.
        assert transport.across.all_to_all.bytes_sent - before == 64 * (BLOCK + 4)
    return transport.name


def _interleaved(one: TwoLevelTransport, other: TwoLevelTransport) -> None:
    """Two wires take turns over the same ranks, and the last is waited for first."""
    rank, world_size = one.rank, one.world_size
    shard = torch.full((5000,), 1.0 + rank)
    fulls = [torch.empty(5000 * world_size) for _ in range(6)]
    sums = [torch.full((5000,), 1.0) for _ in range(6)]
    works = []
    for i, transport in enumerate((one, other) * 3):
        works.append(transport.all_gather([shard], [fulls[i]], LABEL))
        works.append(transport.all_reduce([sums[i]], Reduce.SUM, LABEL))
    for work in reversed(works):
        work.wait()
    expected = torch.arange(1.0, world_size + 1).repeat_interleave(5000)
    for full, total in zip(fulls, sums, strict=True):
        torch.testing.assert_close(full, expected)
        torch.testing.assert_close(total, torch.full((5000,), float(world_size)))


@pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")
def test_processes_share_memory_inside_hosts_and_send_messages_between() -> None:
    assert run_ranks(_real, 4) == ["shm+gloo"] * 4


def _alone(rank: int, world_size: int) -> None:
    with on_host(rank, 2):
        transport = over_world(INT8, "auto")
        shard, full = torch.ones(500), torch.empty(2000)
        transport.all_gather([shard], [full], Label("model.layers.3")).wait()
        if rank == 3:
            os._exit(0)
        transport.all_gather([shard], [full], Label("model.layers.3")).wait()


@pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64")
def test_all_ranks_notice_a_lost_one() -> None:
    # Nobody waits for the timeout: that would be too late for the test.
    first, *neighbors, _ = run_ranks(_alone, 4, pg_timeout=600, expect_failures=True)
    for outcome in neighbors:
        assert "lost rank 3 during the all-gather of model.layers.3" in str(outcome.error)
    assert "lost rank 1 during the all-gather of model.layers.3" in str(first.error)


def _disagree(rank: int, world_size: int) -> str:
    wire = PLAIN.common if rank == 2 else INT8
    with on_host(rank, 2), pytest.raises(RanksDivergedError) as caught:
        compose(dist.group.WORLD, CPU, ChannelOptions("auto", wire))
    return str(caught.value)


@pytest.mark.long
def test_ranks_that_disagree_about_wires_are_told_before_they_meet() -> None:
    found = run_ranks(_disagree, 4, pg_timeout=600)
    for rank, message in enumerate(found):
        if rank != 2:
            assert f"rank {rank} has the wire gather=int8,reduce=int8" in message
            assert "rank 2 has gather=fp32,reduce=fp32" in message
    assert "rank 2 has the wire gather=fp32,reduce=fp32 and rank 0 has gather=int8" in found[2]
