"""Who takes part in which round, where replicas come and go on their own.

    joining ──> training ──> ready ──> averaged ──> training, one round further
       │ fetch     ^           │ ^        │
       └───────────┘           │ └────────┘ the attempt is given up
         behind <──────────────┘ the others went on without it

Every replica reports what it does (:class:`ReplicaReport`); from all reports, and from who can be
heard, the coordinator derives what is to be done (:class:`RoundPlan`). Reports are facts, not
requests: a report may come twice, late, or not at all, and the next one makes up for it.

A round ends in two phases. Its members average what they have, and keep the result. Once all have
reported it, the round is committed, and each member applies its result when it learns of that. If a
member is lost before, the attempt is given up: none applies anything, and the others try again
without it. A replica that was left out takes the outer state of a later round from a member.

No torch, no network, no clock here; see :mod:`shardwise.diloco.quorum_server` for these.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shardwise.elastic.clock import Timers

if TYPE_CHECKING:
    from shardwise.elastic.registry import Presence

#: Attempts of a round with the same members, after which one member at a time is left out.
_PATIENCE = 2
#: Seconds without a sign of life that are no sign of anything: a busy machine takes that long.
_LEAST_SILENCE = 2.0
#: More numbers than a server ever gives to its plans.
NUMBERS_PER_SERVER = 2**32
_MAX_TEXT = 4096
_MAX_RANKS = 4096


class State(enum.Enum):
    """What a replica does."""

    JOINING = "joining"  # it has just started, and waits to learn with what to begin
    TRAINING = "training"
    READY = "ready"  # it waits for the exchange of this round
    AVERAGED = "averaged"  # it has the result of an attempt, and waits for it to be committed
    FAILED = "failed"  # its attempt has failed
    LEFT = "left"  # it has finished, and takes no part any more


#: In these, a replica waits for an attempt: it is ready, or the last one has failed.
_WAITING = (State.READY, State.AVERAGED, State.FAILED)


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself.

    Attributes:
        incarnation: unique for this start of the replica.
        ranks: number of its ranks; each has a connection of its own.
        settings: what must be equal on all replicas, in words.
        digest: of the outer state with which it joined.
        version: outer steps of its outer state.
        state: what it does.
        attempt: the number of the attempt that ``AVERAGED`` and ``FAILED`` are about.
        tokens: tokens trained on since its work was last applied: its weight in the average.
        fetched: the number of the last fetch that has succeeded.
        refetch: the number of the last fetch that has failed.
    """

    incarnation: str
    ranks: int
    settings: str
    digest: str
    version: int
    state: State
    attempt: int = 0
    tokens: int = 0
    fetched: int = 0
    refetch: int = 0

    def __post_init__(self) -> None:
        texts = (self.incarnation, self.settings, self.digest)
        numbers = (self.version, self.attempt, self.tokens, self.fetched, self.refetch)
        if any(len(text) > _MAX_TEXT for text in texts) or min(numbers) < 0:
            raise ValueError("found texts that are too long or negative numbers in a ReplicaReport")
        if not (1 <= self.ranks <= _MAX_RANKS and self.incarnation.isalnum()):
            raise ValueError("found no ranks or no incarnation in a ReplicaReport")


def client_name(replica: int, incarnation: str, rank: int) -> str:
    """Return the name of the connection of a replica's rank to the server."""
    return f"replica/{replica}/{incarnation}/{rank}"


@dataclass(frozen=True)
class Attempt:
    """An attempt at the exchange of a round.

    Attributes:
        number: 1, 2, ... over all rounds.
        version: the round: outer steps that all its members have made.
        group: the number of the attempt whose process group it uses.
        members: incarnation of each member, by the number of the replica.
        tokens: the weight of each member, by the number of the replica.
    """

    number: int
    version: int
    group: int
    members: dict[int, str]
    tokens: dict[int, int]


@dataclass(frozen=True)
class Fetch:
    """An outer state to be sent from one replica to another.

    Attributes:
        number: 1, 2, ... over all.
        incarnation: of the one that receives.
        source: the replica that sends.
        source_incarnation: of that one.
        version: the least number of outer steps that it sends.
    """

    number: int
    incarnation: str
    source: int
    source_incarnation: str
    version: int


@dataclass
class RoundPlan:
    """What is to be done, as all replicas get it.

    Attributes:
        version: outer steps that are committed; -1 until the replicas have come together.
        deadline: seconds that a round waits for a replica that is late.
        number: 0, 1, ...: of this plan.
        live: replicas that take part, or are late.
        called: a replica waits for the exchange of this round; the others come after their step.
        attempt: the one under way.
        fetches: by the replica that receives.
        welcome: incarnations that have joined with the outer state that they had.
        refused: why an incarnation cannot take part.
    """

    version: int
    deadline: float
    number: int = 0
    live: tuple[int, ...] = ()
    called: bool = False
    attempt: Attempt | None = None
    fetches: dict[int, Fetch] = field(default_factory=dict)
    welcome: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


class EventKind(enum.Enum):
    """What has happened."""

    LOST = "lost"  # its connections have ended
    JOINED = "joined"  # it takes part from now on
    CAUGHT_UP = "caught up"  # it was late, and takes part again
    ROUND = "round"  # the members have made an outer step
    LEFT = "left"  # it has finished


@dataclass(frozen=True)
class Event:
    """Something that has happened.

    Attributes:
        kind: what.
        round: outer steps that are committed.
        replica: to whom; -1: to the members of a round.
        source: the replica that sent the outer state; -1: none had to.
        seconds: how long it took.
        live: replicas that take part.
        attempt: that was committed.
        attempts: attempts that the round took.
        late: replicas that are connected, and were left out of the round.
    """

    kind: EventKind
    round: int
    replica: int = -1
    source: int = -1
    seconds: float = 0.0
    live: tuple[int, ...] = ()
    attempt: Attempt | None = None
    attempts: int = 0
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """A replica, as it is seen now."""

    report: ReplicaReport
    is_connected: bool
    is_silent: bool

    @property
    def is_alive(self) -> bool:
        return self.is_connected and not self.is_silent and self.report.state is not State.LEFT


class Coordinator:
    """Decides who takes part in which round.

    Args:
        replicas: how many are expected at the start.
        deadline: seconds that a round waits for a replica that is late, and after which one that is
            not heard is taken for silent, which takes 2 s at least.
        start_timeout: seconds that the first replica to come waits for the others.
        first: from where plans, attempts and fetches are numbered. Replicas may know those of
            another server: two servers are :data:`NUMBERS_PER_SERVER` apart at least.
        clock: in seconds; it stands still while this process is suspended.
    """

    def __init__(
        self,
        replicas: int,
        deadline: float,
        start_timeout: float,
        clock: Callable[[], float],
        first: int = 0,
    ) -> None:
        self._expected = replicas
        self._deadline = deadline
        self._start_timeout = start_timeout
        self.plan = RoundPlan(-1, deadline, first)
        self._seen: dict[int, _Seen] = {}
        self._timers = Timers(clock)
        self._attempts = 0  # at this round
        self._number = self._fetch_number = first
        self._tried: dict[int, set[int]] = {}
        self._group: tuple[dict[int, str], int] = {}, 0  # members, and the first attempt of theirs
        self._last: Attempt | None = None  # committed
        self._members: dict[int, str] = {}  # incarnations that take part, or are late
        self._events: list[Event] = []

    def look(self, presence: Presence[ReplicaReport]) -> list[Event]:
        """Look at the replicas, and change the plan.

        Args:
            presence: what replicas report, by their numbers, and the connections of their ranks, by
                :func:`client_name`.

        Returns:
            What has happened. Then the plan has changed, if anything has.
        """
        self._events, before = [], self.plan
        self.plan = replace(before, fetches={**before.fetches}, refused={**before.refused})
        self._see(presence)
        self._note_lost()
        is_apart = self.plan.version < 0 or self._is_headless
        waits = is_apart and any(each.is_alive for each in self._seen.values())
        waited = self._timers.elapsed("coming together", (waits, self.plan.welcome))
        if waits:
            self._come_together(waited)
        if self.plan.version >= 0:
            self._watch_attempt()
            self._watch_fetches()
            if self.plan.attempt is None:
                self._begin_if_due()
        self.plan.live = tuple(sorted(self._members))
        self.plan.number += self.plan != before
        return self._events

    # -- who is there ------------------------------------------------------------------------------

    def _see(self, presence: Presence[ReplicaReport]) -> None:
        seen: dict[int, _Seen] = {}
        numbers = {key: int(key) for key in presence.reports if key.isdecimal() and len(key) < 10}
        for key, replica in sorted(numbers.items(), key=lambda each: each[1]):
            report = presence.reports[key]
            names = [client_name(replica, report.incarnation, r) for r in range(report.ranks)]
            heard = [presence.silence.get(name) for name in names]
            is_connected = all(each is not None for each in heard)
            limit = max(self._deadline, _LEAST_SILENCE)
            silent = any(s is not None and s >= limit for s in heard)
            if report.incarnation in self.plan.refused:
                continue
            seen[replica] = _Seen(report, is_connected, silent)
        self._seen = seen

    def _note_lost(self) -> None:
        for replica in list(self._members):
            each = self._seen[replica] if self._is_member(replica) else None
            has_left = each is not None and each.report.state is State.LEFT
            if each is None or has_left or not each.is_connected:
                del self._members[replica]
                self.plan.fetches.pop(replica, None)
                self._note(EventKind.LEFT if has_left else EventKind.LOST, replica)

    def _note(self, kind: EventKind, replica: int = -1, **facts: Any) -> None:
        """Note an event, with the members and the round as they are now."""
        live = tuple(sorted(self._members))
        self._events.append(Event(kind, self.plan.version, replica, live=live, **facts))

    @property
    def _is_headless(self) -> bool:
        """Whether no one is left who has the outer state of this round, so that it is chosen anew.

        A member that is silent has it, and may come back: others wait for it as at the start.
        """
        return not any(self._is_member(r) and each.is_alive for r, each in self._seen.items())

    def _is_member(self, replica: int) -> bool:
        each = self._seen.get(replica)
        return each is not None and self._members.get(replica) == each.report.incarnation

    def _is_current(self, replica: int) -> bool:
        """Whether a replica lives and has the outer state of this round."""
        each = self._seen[replica]
        is_alive = self._is_member(replica) and each.is_alive
        return is_alive and each.report.version == self.plan.version

    def _is_applying(self, replica: int) -> bool:
        """Whether a member of the last round has still to apply its result."""
        each, last = self._seen[replica], self._last
        return (
            last is not None
            and last.members.get(replica) == each.report.incarnation
            and each.report.version == last.version
            and last.version + 1 == self.plan.version
        )

    # -- the beginning -----------------------------------------------------------------------------

    def _come_together(self, waited: float) -> None:
        """Let the replica with the most outer steps be the first, once all are there."""
        live = {r: each.report for r, each in self._seen.items() if each.is_alive}
        if len(live) < self._expected and waited < self._start_timeout:
            return
        first = max(live, key=lambda replica: (live[replica].version, -replica))
        leader = live[first]
        self.plan.version, self.plan.called, self.plan.attempt = leader.version, False, None
        self.plan.fetches.clear()
        self._last, self._attempts = None, 0
        self._welcome(first)
        for replica, report in live.items():
            if replica != first and not self._is_refused(replica, first):
                alike = (report.version, report.digest) == (leader.version, leader.digest)
                if alike and report.state is State.JOINING:  # the digest is of then
                    self._welcome(replica)

    def _is_refused(self, replica: int, other: int) -> bool:
        """Refuse a replica whose settings are not those of another one; return whether it is."""
        report, theirs = self._seen[replica].report, self._seen[other].report
        if report.settings == theirs.settings:
            return False
        self.plan.refused[report.incarnation] = (
            f"DiLoCo: replica {replica} has {report.settings}; replica {other} has "
            f"{theirs.settings}. All replicas need the same model, sharded in the same way, and "
            "the same settings"
        )
        return True

    def _welcome(self, replica: int) -> None:
        self._members[replica] = incarnation = self._seen[replica].report.incarnation
        self.plan.welcome = (*self.plan.welcome, incarnation)
        self._note(EventKind.JOINED, replica)

    # -- catching up -------------------------------------------------------------------------------

    def _watch_fetches(self) -> None:
        for replica, each in self._seen.items():
            report, fetch = each.report, self.plan.fetches.get(replica)
            if fetch is not None and fetch.incarnation != report.incarnation:
                del self.plan.fetches[replica]
                fetch = None
            if not each.is_alive:
                continue
            if fetch is not None:
                self._watch_fetch(replica, fetch)
            elif not self._is_member(replica) or (
                report.version != self.plan.version and not self._is_applying(replica)
            ):
                self._assign(replica)

    def _watch_fetch(self, replica: int, fetch: Fetch) -> None:
        report = self._seen[replica].report
        if report.fetched == fetch.number:
            joins = not self._is_member(replica)
            self._members[replica] = report.incarnation
            seconds = self._timers.elapsed(f"fetch of {replica}", fetch.number)
            del self.plan.fetches[replica]
            self._tried.pop(replica, None)
            kind = EventKind.JOINED if joins else EventKind.CAUGHT_UP
            self._note(kind, replica, source=fetch.source, seconds=seconds)
        elif report.refetch == fetch.number or not self._can_send(fetch):
            self._tried.setdefault(replica, set()).add(fetch.source)
            del self.plan.fetches[replica]
            self._assign(replica)

    def _can_send(self, fetch: Fetch) -> bool:
        is_same = self._members.get(fetch.source) == fetch.source_incarnation
        return is_same and self._is_member(fetch.source) and self._seen[fetch.source].is_alive

    def _assign(self, replica: int) -> None:
        """Say from whom a replica gets the outer state of this round."""
        sources = [r for r in self._seen if r != replica and self._is_current(r)]
        if not sources:
            return  # all are about to apply the last round, or are silent
        tried = self._tried.setdefault(replica, set())
        if tried >= set(sources):
            tried.clear()
        source = min(r for r in sources if r not in tried)
        if self._is_refused(replica, source):
            return
        report, theirs = self._seen[replica].report, self._seen[source].report
        self._fetch_number += 1
        fetch = Fetch(
            self._fetch_number, report.incarnation, source, theirs.incarnation, self.plan.version
        )
        self._timers.elapsed(f"fetch of {replica}", fetch.number)  # from now on
        self.plan.fetches[replica] = fetch

    # -- rounds ------------------------------------------------------------------------------------

    def _watch_attempt(self) -> None:
        attempt = self.plan.attempt
        if attempt is None:
            return
        states = [self._state_in(attempt, replica) for replica in attempt.members]
        if all(state is State.AVERAGED for state in states):
            self._commit(attempt)
        elif any(state in (None, State.FAILED) for state in states):
            self.plan.attempt = None
            self._group = {}, 0  # its connections are closed

    def _state_in(self, attempt: Attempt, replica: int) -> State | None:
        """Return how far a member is with an attempt; None: it is lost or silent."""
        each = self._seen.get(replica)
        if each is None or not self._is_member(replica):
            return None
        report = each.report
        if report.incarnation != attempt.members[replica]:
            return None
        if report.attempt == attempt.number and report.state is State.AVERAGED:
            return State.AVERAGED  # even if it is silent by now
        if not each.is_alive:
            return None
        return State.FAILED if report.attempt == attempt.number else State.READY

    def _commit(self, attempt: Attempt) -> None:
        late = tuple(
            replica
            for replica in sorted(self._members)
            if replica not in attempt.members and self._seen[replica].is_connected
        )
        self._last = attempt
        self.plan.version, self.plan.called, self.plan.attempt = attempt.version + 1, False, None
        seconds = self._timers.elapsed("attempt", attempt.number)
        tried = self._attempts
        self._note(EventKind.ROUND, seconds=seconds, attempt=attempt, attempts=tried, late=late)
        self._attempts = 0

    def _begin_if_due(self) -> None:
        current = {r: each.report for r, each in self._seen.items() if self._is_current(r)}
        ready = {r: report for r, report in current.items() if report.state in _WAITING}
        self.plan.called = called = bool(ready)
        waited = self._timers.elapsed("called", (called, self.plan.version, self.plan.welcome))
        if not ready:
            return
        awaited = sum(each.is_alive and self._is_applying(r) for r, each in self._seen.items())
        awaited += len(current) - len(ready)
        if awaited and waited < self._deadline:
            return
        self._attempts += 1
        members = dict(sorted(ready.items()))
        if self._attempts > _PATIENCE and len(members) > 1:
            # All live, and still they cannot reach each other: look for the one who is the cause.
            del members[sorted(members)[-(self._attempts - _PATIENCE) % len(members)]]
        self._number += 1
        self._timers.elapsed("attempt", self._number)  # from now on
        names = {r: report.incarnation for r, report in members.items()}
        if names != self._group[0]:
            self._group = names, self._number
        self.plan.attempt = Attempt(
            number=self._number,
            version=self.plan.version,
            group=self._group[1],
            members=names,
            tokens={r: report.tokens for r, report in members.items()},
        )


def numbers_of(replicas: Iterable[int]) -> str:
    """Return numbers for people: ``0, 2 and 3``."""
    *rest, last = map(str, replicas)
    return f"{', '.join(rest)} and {last}" if rest else last
