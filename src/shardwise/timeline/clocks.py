"""Bringing the clocks of ranks together.

Every rank reads the monotonic clock of its host. Ranks on one host read the same one. Between hosts
such clocks have nothing in common, so the first rank of each host asks rank 0 for the time, over
the store in which the ranks found each other, and takes the middle between question and answer (as
NTP does, https://www.rfc-editor.org/rfc/rfc5905). The answer cannot be off by more than half of the
round trip; of several, the shortest counts. It is asked at the beginning and at the end of a
recording, and the difference is spread over the time in between: clocks drift apart, by up to some
tens of microseconds a second.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.transport.peers import Peers

#: Questions to rank 0; the one with the shortest round trip counts.
ROUNDS = 12

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")

_meetings = itertools.count()


@dataclass(frozen=True, slots=True)
class Reading:
    """What the clock of rank 0 showed at one moment.

    Attributes:
        own: nanoseconds on this rank's clock.
        ahead: nanoseconds by which the clock of rank 0 was ahead of it.
        uncertainty: nanoseconds by which that may be off.
        zero: a time on the clock of rank 0, shortly before; the same on every rank.
    """

    own: int
    ahead: int
    uncertainty: int
    zero: int


@dataclass(frozen=True, slots=True)
class SharedClock:
    """Turns times of this rank into those of the clock that ranks share, in seconds.

    Attributes:
        first: what the clock of rank 0 showed at the beginning.
        last: what it showed at the end; the same as ``first`` if nobody asked any more.
    """

    first: Reading
    last: Reading

    def __call__(self, own: int) -> float:
        """Return the shared time of a time of this rank, in nanoseconds of its clock.

        It is 0 when the recording began on rank 0.
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
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return platform.node()
    try:
        return f"{boot} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:  # a kernel without namespaces of time
        return boot


def read_clock(
    peers: Peers | None,
    now: Callable[[], int] = time.perf_counter_ns,
    clock: str | None = None,
) -> Reading:
    """Compare this rank's clock with that of rank 0. All ranks call it.

    Args:
        peers: all ranks; ``None``: this process is alone.
        now: this rank's clock, in nanoseconds.
        clock: its name, by which ranks that share it are known; by default that of the host's.

    Raises:
        PeerLostError: a peer is gone, or did not answer in time.
    """
    if peers is None or peers.size == 1:
        return Reading(own := now(), 0, 0, own)
    doing = "the comparison of clocks"
    mine = clock_of_host() if clock is None else clock
    told = peers.gather_objects((mine, next(_meetings), now()), doing)
    clocks = [each for each, _, _ in told]
    _, meeting, zero = told[0]
    # The first rank of each clock asks for all who read it.
    asking = [rank for rank, each in enumerate(clocks) if clocks.index(each) == rank][1:]
    prefix = f"shardwise/clocks/{meeting}"
    found: tuple[int, int] | None = None
    if peers.rank == 0:
        peers.call(lambda: _answer(peers, prefix, asking, now), doing)
    elif peers.rank in asking:
        found = peers.call(lambda: _ask(peers, f"{prefix}/{peers.rank}", now), doing, [0])
    everyone = peers.gather_objects(found, doing)
    ahead, uncertainty = everyone[clocks.index(clocks[peers.rank])] or (0, 0)
    return Reading(now(), ahead, uncertainty, zero)


def _answer(peers: Peers, prefix: str, asking: list[int], now: Callable[[], int]) -> None:
    """Answer the questions of other ranks, one rank after the other."""
    store = peers.store
    for rank in asking:
        for i in range(ROUNDS):
            store.get(f"{prefix}/{rank}/{i}/asked")  # blocks until it is there
            store.set(f"{prefix}/{rank}/{i}/told", str(now()))


def _ask(peers: Peers, prefix: str, now: Callable[[], int]) -> tuple[int, int]:
    """Ask rank 0 for the time; return how far it is ahead, and by how much that may be off."""
    store = peers.store
    answers = []
    for i in range(ROUNDS):
        asked = now()
        store.set(f"{prefix}/{i}/asked", "")
        told = int(store.get(f"{prefix}/{i}/told"))
        heard = now()
        answers.append((heard - asked, told - (asked + heard) // 2))
        for word in ("asked", "told"):
            store.delete_key(f"{prefix}/{i}/{word}")
    trip, ahead = min(answers)
    return ahead, trip // 2
