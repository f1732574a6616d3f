"""Ranks that come together at the beginning and at the end of a recording, and compare clocks.

A rank that is not recorded may be in a collective of its own, which one of ours would be mistaken
for. So ranks meet in the store, where no rank has to come. The last rank to come decides that all
take part; the first whose patience is over, that those do who are there. This is one compare and
set, so that all agree.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.transport.carrier import host_by
from shardwise.transport.peers import Notice, Peers, polling

#: Waits until the first function returns true, or patience is over; the second one returns the
#: ranks that are missing.
Wait = Callable[[Callable[[], bool], Callable[[], Sequence[int]]], object]


@dataclass(frozen=True)
class Meeting:
    """A place in the store where ranks may come together once.

    Attributes:
        store: the store.
        name: of the meeting; the same on all ranks.
        rank: this rank.
        invited: the ranks that may come.
    """

    store: Any
    name: str
    rank: int
    invited: Sequence[int]

    def come(self, mine: str) -> None:
        """Say something to the others, and do not wait for what they say."""
        self.store.set(self._key(self.rank), mine)
        if self.store.add(f"{self.name}/come", 1) == len(self.invited):
            self._decide(self.invited)

    def meet(self, mine: str, wait: Wait) -> Mapping[int, str]:
        """Say something to the others, and wait for them.

        Args:
            mine: what this rank says.
            wait: waits for the others.

        Returns:
            What those ranks have said that take part, in order. This rank is not among them if they
            have decided before it came.
        """
        self.come(mine)
        if not self.is_decided():
            wait(self.is_decided, self.missing)
        if not self.is_decided():
            missing = self.missing()
            self._decide([rank for rank in self.invited if rank not in missing])
        part = json.loads(self.store.get(self._decision))
        said = self.store.multi_get([self._key(rank) for rank in part])
        return {rank: text.decode() for rank, text in zip(part, said, strict=True)}

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [rank for rank in self.invited if not self.store.check([self._key(rank)])]

    @property
    def _decision(self) -> str:
        return f"{self.name}/decided"

    def _key(self, rank: int) -> str:
        return f"{self.name}/{rank}"

    def is_decided(self) -> bool:
        """Return whether it is known who takes part."""
        return bool(self.store.check([self._decision]))

    def _decide(self, part: Sequence[int]) -> None:
        self.store.compare_set(self._decision, "", json.dumps(list(part)))


def waiting_for(peers: Peers, doing: str, seconds: float) -> Wait:
    """Return a wait for other ranks of ``seconds``.

    It raises ``PeerLostError`` if one of those that are missing is gone.
    """

    def wait(decided: Callable[[], bool], missing: Callable[[], Sequence[int]]) -> None:
        until = time.monotonic() + seconds
        over = polling(lambda: decided() or time.monotonic() > until)
        peers.watch(doing, Notice.NOTHING).wait(over, missing)

    return wait


@dataclass
class Turns:
    """Which recording is the next one.

    Attributes:
        number: of the next recording.
        late: whether this rank came too late for the last one.
    """

    number: int = 0
    late: bool = False

    def take(self, store: Any, rank: int, invited: Sequence[int]) -> Meeting:
        """Return the meeting at the beginning of the next recording.

        A rank that came too late may have left out a recording, and lags behind. So it goes on to
        the first meeting that is not decided.
        """
        while True:
            found = Meeting(store, f"shardwise/recording/{self.number}", rank, invited)
            self.number += 1
            if not (self.late and found.is_decided()):
                return found


def first_turns(peers: Peers) -> Turns:
    """Return the turns of a process group that has recorded nothing yet."""
    return Turns()


# -- clocks ----------------------------------------------------------------------------------------

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

    def __call__(self, own: float) -> float:
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
