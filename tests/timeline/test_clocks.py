"""Bringing the clocks of ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.timeline.meeting import (
    ClockReport,
    Reading,
    SharedClock,
    ask,
    clock_of_host,
    own_clock,
    read_clock,
)
from shardwise.transport.peers import Peers


def test_a_clock_alone_begins_at_zero() -> None:
    reading = own_clock(lambda: 5_000_000_000)
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


def _all_told(names: Sequence[str]) -> dict[int, ClockReport]:
    found = Peers().gather_objects(time.perf_counter_ns(), "a test")
    return {rank: ClockReport(names[rank], now) for rank, now in enumerate(found)}


def _compared(rank: int, world_size: int) -> tuple[float, float, float]:
    def now() -> int:
        return time.perf_counter_ns() + _AHEAD[rank] * 10**9

    told = _all_told([f"clock {ahead}" for ahead in _AHEAD])
    readings = [read_clock(Peers(), told, f"meeting {i}", now) for i in range(2)]
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


class _Script:
    """A store and two clocks, on which one rank asks and the other answers at given times."""

    def __init__(self, ahead: int, trips: Sequence[tuple[int, int]]) -> None:
        self.ahead, self.trips = ahead, list(trips)
        self.time = 0
        self.keys = dict[str, str]()

    def now(self) -> int:
        return self.time

    def set(self, key: str, value: str) -> None:
        there, back = self.trips[0]
        self.keys[key.replace("asked", "answered")] = str(self.time + there + self.ahead)
        self.time += there + back
        self.trips.append(self.trips.pop(0))

    def get(self, key: str) -> str:
        return self.keys[key]

    def delete_key(self, key: str) -> None:
        self.keys.pop(key, None)


def _asked(ahead: int, *trips: tuple[int, int]) -> tuple[int, int]:
    """What a rank finds out whose messages take so long to the other, and back."""
    store = _Script(ahead, trips)
    found = ask(store, "clock", store.now)
    assert not store.keys, "nothing is left in the store"
    return found


def test_an_answer_that_takes_as_long_there_as_back_is_exact() -> None:
    assert _asked(1_000_000, (40, 40)) == (1_000_000, 40)
    assert _asked(-1_000_000, (40, 40)) == (-1_000_000, 40)


def test_an_answer_is_never_off_by_more_than_it_says() -> None:
    for there, back in ((0, 1000), (1000, 0), (300, 700)):
        ahead, uncertainty = _asked(5_000, (there, back))
        assert uncertainty == 500
        assert abs(ahead - 5_000) <= uncertainty


def test_of_several_answers_the_quickest_counts() -> None:
    assert _asked(5_000, (9_000, 100), (20, 20), (100, 9_000)) == (5_000, 20)


def _read(rank: int, world_size: int) -> tuple[Reading, Reading | None]:
    told = _all_told(["same"] * 3)
    everyone = read_clock(Peers(), told, "meeting")
    told = _all_told(["a", "b", "b"])
    del told[0]  # it is not recorded, and has something else to do
    others = None if rank == 0 else read_clock(Peers(), told, "another meeting")
    dist.barrier()
    return everyone, others


def test_ranks_of_one_host_need_not_ask_and_ranks_can_do_without_rank_0(
    ranks: Callable[..., list[Any]],
) -> None:
    everyone, (none, second, third) = zip(*ranks(_read, 3), strict=True)
    assert [(each.ahead, each.uncertainty) for each in everyone] == [(0, 0)] * 3
    assert len({each.zero for each in everyone}) == 1
    assert none is None
    assert second.zero == third.zero
    assert (second.ahead, third.ahead) == (0, 0)
