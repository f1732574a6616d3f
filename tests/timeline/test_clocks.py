"""Bringing the clocks of ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.timeline.clocks import Reading, SharedClock, clock_of_host, read_clock
from shardwise.transport.peers import Peers


def test_a_clock_alone_begins_at_zero() -> None:
    reading = read_clock(None, now=lambda: 5_000_000_000)
    shared = SharedClock(reading, reading)
    assert shared(5_000_000_000) == 0.0
    assert shared(6_500_000_000) == 1.5
    assert shared.uncertainty == 0.0


def test_drift_is_spread_over_the_recording() -> None:
    # This clock gains a millisecond in ten seconds on that of rank 0.
    first = Reading(own=0, ahead=100_000_000, uncertainty=20_000, zero=50_000_000)
    last = Reading(own=10_000_000_000, ahead=99_000_000, uncertainty=30_000, zero=0)
    shared = SharedClock(first, last)
    assert shared(0) == pytest.approx(0.05)
    assert shared(5_000_000_000) == pytest.approx(5.0495)
    assert shared(10_000_000_000) == pytest.approx(10.049)
    assert shared.uncertainty == pytest.approx(30e-6)


def test_the_clock_of_a_host_is_the_same_for_all_of_its_processes(
    ranks: Callable[..., list[Any]],
) -> None:
    assert ranks(_clock, 1, backend=None) == [clock_of_host()]


def _clock(rank: int, world_size: int) -> str:
    return clock_of_host()


#: Seconds by which the clocks of four ranks are ahead; the last two read the same one.
_AHEAD = (0, 3600, -7, -7)


def _compared(rank: int, world_size: int) -> tuple[float, float, float]:
    def now() -> int:
        return time.perf_counter_ns() + _AHEAD[rank] * 10**9

    readings = [read_clock(Peers(), now, f"clock {_AHEAD[rank]}") for _ in range(2)]
    shared = SharedClock(*readings)
    # This process's real clock is the same for all ranks here: what each says of it must agree.
    real = time.perf_counter_ns()
    said = shared(real + _AHEAD[rank] * 10**9)
    return real / 1e9 - said, shared.uncertainty, readings[0].zero / 1e9


def test_ranks_with_clocks_far_apart_agree_within_what_they_say(
    ranks: Callable[..., list[Any]],
) -> None:
    found = ranks(_compared, len(_AHEAD))
    zeros = [zero for zero, _, _ in found]
    assert found[0][1] == 0.0
    assert found[2][1] == found[3][1] > 0
    for zero, uncertainty, told in found:
        assert told == found[0][2]
        assert abs(zero - zeros[0]) <= uncertainty + 1e-6
        assert uncertainty < 1.0


def test_ranks_of_one_host_need_not_ask(ranks: Callable[..., list[Any]]) -> None:
    readings = ranks(_read, 3)
    assert [(each.ahead, each.uncertainty) for each in readings] == [(0, 0)] * 3


def _read(rank: int, world_size: int) -> Reading:
    return read_clock(Peers())
