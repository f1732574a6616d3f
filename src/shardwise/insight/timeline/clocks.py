"""Bringing the clocks of ranks together.

Every rank reads the monotonic clock of its host. Ranks on one host read the same one. Between hosts
such clocks have nothing in common, so the first rank of each host asks the first of all (rank 0,
unless it is not recorded) for the time, over the store in which the ranks found each other, and
takes the middle between question and answer (as NTP does, https://www.rfc-editor.org/rfc/rfc5905).
The answer cannot be off by more than half of the round trip; of several, the shortest counts. It is
asked at the beginning and at the end of a recording, and the difference is spread over the time in
between: clocks drift apart, by up to some tens of microseconds a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.transport.carrier import host_by
from shardwise.transport.peers import Peers

#: Questions to the first rank; the one with the shortest round trip counts.
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Reading:
    """What the clock of the first rank showed at one moment.

    Attributes:
        own: nanoseconds on this rank's clock.
        ahead: nanoseconds by which the clock of the first rank was ahead of it.
        uncertainty: nanoseconds by which that may be off.
        zero: a time on the clock of the first rank, shortly before; the same on every rank.
    """

    own: int
    ahead: int
    uncertainty: int
    zero: int


@dataclass(frozen=True, slots=True)
class SharedClock:
    """Turns times of this rank into those of the clock that ranks share, in seconds.

    Attributes:
        first: what the clock of the first rank showed at the beginning.
        last: what it showed at the end; the same as ``first`` if it was not asked again.
    """

    first: Reading
    last: Reading

    def __call__(self, own: int) -> float:
        """Return the shared time of a time of this rank, in nanoseconds of its clock.

        It is 0 when the recording began on the first rank.
        """
        ahead = float(self.first.ahead)
        between = self.last.own - self.first.own
        if between > 0:
            ahead += (self.last.ahead - self.first.ahead) * (own - self.first.own) / between
        return (own - self.first.zero + ahead) / 1e9

    @property
    def uncertainty(self) -> float:
        """Seconds by which a shared time may be off."""
        return max(self.first.uncertainty, self.last.uncertainty) / 1e9


def clock_of_host() -> str:
    """Name the clock that :func:`time.perf_counter_ns` reads: the same for all who read it."""
    return host_by("time")


@dataclass(frozen=True, slots=True)
class ClockReport:
    """What a rank says of its clock to the others.

    Attributes:
        clock: the name of its clock, by which ranks that share it are known.
        now: nanoseconds on it.
    """

    clock: str
    now: int


def own_clock(now: Callable[[], int] = time.perf_counter_ns) -> Reading:
    """Return a reading of this rank's clock, for a rank that is recorded alone."""
    return Reading(own := now(), 0, 0, own)


def read_clock(
    peers: Peers,
    reports: Mapping[int, ClockReport],
    meeting: str,
    now: Callable[[], int] = time.perf_counter_ns,
) -> Reading:
    """Compare this rank's clock with that of the first rank. All ranks that are named call it.

    Args:
        peers: all ranks.
        reports: the ranks that are recorded, in order, and what each has said of its clock.
        meeting: where they ask for the time; the same name on all ranks, used once.
        now: this rank's clock, in nanoseconds.

    Raises:
        PeerLostError: a peer is gone, or did not answer in time.
    """
    reference, *_ = reports
    firsts: dict[str, int] = {}  # the first rank of each clock asks for all who read it
    for rank, each in reports.items():
        firsts.setdefault(each.clock, rank)
    asking = [rank for rank in firsts.values() if rank != reference]
    first, doing = firsts[reports[peers.rank].clock], "the comparison of clocks"
    prefix, store, ahead = f"{meeting}/clocks", peers.store, (0, 0)
    if peers.rank == reference:
        peers.call(lambda: _answer(store, prefix, asking, now), doing, asking)
    elif peers.rank == first:
        ahead = peers.call(lambda: ask(store, f"{prefix}/{first}", now), doing, [reference])
        store.set(f"{prefix}/{first}/ahead", json.dumps(ahead))
    elif first != reference:
        # blocks until it is there
        found = peers.call(lambda: store.get(f"{prefix}/{first}/ahead"), doing, [first])
        ahead = json.loads(found)
    return Reading(now(), ahead[0], ahead[1], reports[reference].now)


def _answer(store: Any, prefix: str, asking: list[int], now: Callable[[], int]) -> None:
    """Answer the questions of other ranks, one rank after the other."""
    for rank in asking:
        for i in range(ROUNDS):
            store.get(f"{prefix}/{rank}/{i}/asked")  # blocks until it is there
            store.set(f"{prefix}/{rank}/{i}/answered", str(now()))


def ask(store: Any, prefix: str, now: Callable[[], int]) -> tuple[int, int]:
    """Ask another rank for the time, which answers meanwhile.

    Args:
        store: where to.
        prefix: of the keys; they are deleted in the end.
        now: this rank's clock, in nanoseconds.

    Returns:
        Nanoseconds by which the other's clock is ahead, and by which that may be off.
    """
    answers = []
    for i in range(ROUNDS):
        asked = now()
        store.set(f"{prefix}/{i}/asked", "")
        answered = int(store.get(f"{prefix}/{i}/answered"))
        heard = now()
        answers.append((heard - asked, answered - (asked + heard) // 2))
        for word in ("asked", "answered"):
            store.delete_key(f"{prefix}/{i}/{word}")
    trip, ahead = min(answers)
    return ahead, trip // 2
