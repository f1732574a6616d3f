"""The timeline of all ranks: what the time of a step went into, and who waited for whom.

At each moment of a step a rank does one thing. Where activities overlap, because one is inside
another or runs in another thread, the first of these counts:

    waiting     nothing but waiting for other ranks, or for bytes: exposed communication
    copying     between host and device, or between buffers
    runtime     issuing gathers and reductions
    optimizer
    recompute   forward again, inside backward
    backward
    forward
    other       none of these: loading data, the loss, logging

Where times of the device were recorded, these are what counts: a host that waits in advance costs
nothing.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from shardwise.base import plain, units
from shardwise.base.errors import CheckpointError
from shardwise.base.observe import Activity
from shardwise.base.spans import Span, StepTime
from shardwise.base.strict import Fields, refuse
from shardwise.timeline.rank import COLLECTIVES, RankTimeline, Step


class Part(enum.Enum):
    """What a rank does at a moment."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    RUNTIME = "runtime"
    COPY = "copying"
    WAIT = "waiting"
    OTHER = "other"


_PART = {
    Activity.FORWARD: Part.FORWARD,
    Activity.BACKWARD: Part.BACKWARD,
    Activity.OPTIMIZER: Part.OPTIMIZER,
    Activity.UNSHARD: Part.RUNTIME,
    Activity.SUPPLY: Part.RUNTIME,
    Activity.REDUCE: Part.RUNTIME,
    Activity.COPY: Part.COPY,
    Activity.WAIT: Part.WAIT,
}

#: What counts first where several happen at once.
_ORDER = (
    *(Part.WAIT, Part.COPY, Part.RUNTIME, Part.OPTIMIZER),
    *(Part.RECOMPUTE, Part.BACKWARD, Part.FORWARD),
)

_Interval = tuple[float, float]


@dataclass(frozen=True)
class StepWait:
    """Time that a rank spent waiting in one step, for one thing.

    Attributes:
        name: of the group whose collective it waited for.
        dimension: the mesh dimension.
        seconds: how long, in all.
        peer: the rank that it waited for; ``None``: for bytes, or unknown.
    """

    name: str
    dimension: str
    seconds: float
    peer: int | None


@dataclass(frozen=True)
class StepOfRank:
    """One step of one rank.

    Attributes:
        rank: the rank.
        step: the step.
        parts: seconds of each part; together the length of the step.
        waits: what it waited for, the longest first.
    """

    rank: int
    step: Step
    parts: Mapping[Part, float]
    waits: tuple[StepWait, ...]

    @property
    def busy(self) -> float:
        """Seconds in which it did not wait."""
        return self.step.seconds - self.parts[Part.WAIT]

    def waited_for(self, peer: int) -> float:
        """Return how long it waited for another rank."""
        return sum(wait.seconds for wait in self.waits if wait.peer == peer)


@dataclass(frozen=True)
class StepOfAll:
    """One step of all ranks that recorded it.

    Attributes:
        number: of the step.
        ranks: what each did, by rank.
    """

    number: int
    ranks: tuple[StepOfRank, ...]

    @property
    def seconds(self) -> float:
        """How long it took, from the first rank's begin to the last one's end."""
        return max(r.step.end for r in self.ranks) - min(r.step.begin for r in self.ranks)

    @property
    def slowest(self) -> int:
        """The rank that was busy longest: the others waited for it."""
        return max(self.ranks, key=lambda each: (each.busy, -each.rank)).rank

    def part(self, part: Part) -> float:
        """Return the mean seconds of a part, over ranks."""
        return sum(each.parts[part] for each in self.ranks) / len(self.ranks)

    def waited_for(self, rank: int) -> float:
        """Return how long all other ranks together waited for one."""
        return sum(each.waited_for(rank) for each in self.ranks if each.rank != rank)


# -- parts -----------------------------------------------------------------------------------------


def _of_rank(
    rank: int, step: Step, spans: Sequence[Span], last: Mapping[_Call, tuple[int, float]]
) -> StepOfRank:
    taken: dict[Part, list[_Interval]] = {part: [] for part in _ORDER}
    backward = [_time(span) for span in spans if span.activity is Activity.BACKWARD]
    for span in spans:
        part = _PART.get(span.activity)
        if part is None:
            continue
        time = _time(span)
        if part is Part.FORWARD and any(b <= time[0] and time[1] <= e for b, e in backward):
            part = Part.RECOMPUTE
        taken[part].append(time)
    parts, covered = {}, list[_Interval]()
    for part in _ORDER:
        before = _length(covered)
        covered = _union([*covered, *_clipped(taken[part], step.begin, step.end)])
        parts[part] = _length(covered) - before
    parts[Part.OTHER] = max(0.0, step.seconds - _length(covered))
    return StepOfRank(rank, step, parts, _waits(rank, step, spans, last))


def _time(span: Span) -> _Interval:
    """When something took place: on the device, if that is known."""
    return span.device or (span.begin, span.begin if span.end is None else span.end)


def _clipped(times: Iterable[_Interval], begin: float, end: float) -> list[_Interval]:
    return [(max(b, begin), min(e, end)) for b, e in times if b < end and e > begin]


def _union(times: Iterable[_Interval]) -> list[_Interval]:
    """Return intervals that do not overlap, and cover the same."""
    joined: list[_Interval] = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(times: Iterable[_Interval]) -> float:
    return sum(end - begin for begin, end in times)


# -- who waited for whom ---------------------------------------------------------------------------

#: A collective that several ranks call: what, of which group, over which dimension, among whom, and
#: the how-many-th of these in the step.
_Call = tuple[Activity, str, str, tuple[int, ...], int]


def _calls(spans: Iterable[Span]) -> list[tuple[_Call, Span]]:
    counts: dict[tuple[Activity, str, str, tuple[int, ...]], int] = defaultdict(int)
    found: list[tuple[_Call, Span]] = []
    for span in spans:
        if span.activity in COLLECTIVES:
            key = span.activity, span.name, span.dimension, span.members
            found.append(((*key, counts[key]), span))
            counts[key] += 1
    return found


def _last_to_come(ranks: Iterable[tuple[int, Sequence[Span]]]) -> dict[_Call, tuple[int, float]]:
    """Return which rank issued each collective last, and when.

    Only of those that all members recorded.
    """
    issued: dict[_Call, dict[int, float]] = defaultdict(dict)
    for rank, spans in ranks:
        for call, span in _calls(spans):
            issued[call][rank] = span.begin
    last: dict[_Call, tuple[int, float]] = {}
    for call, times in issued.items():
        if len(times) > 1 and set(times) == set(call[3]):
            rank = max(times, key=lambda each: (times[each], -each))
            last[call] = rank, times[rank]
    return last


def _waits(
    rank: int, step: Step, spans: Sequence[Span], last: Mapping[_Call, tuple[int, float]]
) -> tuple[StepWait, ...]:
    """Say what a rank waited for.

    Transports that know whom report it. Else it is the last rank to issue the collective: a wait
    for it ends when it does, and what is left is the time that bytes took.
    """
    peers = [span for span in spans if span.activity is Activity.PEER]
    ends: dict[tuple[str, str], list[tuple[float, _Call]]] = defaultdict(list)
    for call, span in _calls(spans):
        if span.end is not None:
            ends[span.name, span.dimension].append((span.end, call))
    seconds: dict[tuple[str, str, int | None], float] = defaultdict(float)
    for span in spans:
        if span.activity is not Activity.WAIT or span.end is None:
            continue
        begin, end = max(span.begin, step.begin), min(span.end, step.end)
        left = max(0.0, end - begin)
        inside = [p for p in peers if p.end is not None and begin <= p.begin and p.end <= end]
        for peer in inside:
            seconds[span.name, span.dimension, int(peer.name)] += peer.seconds
            left -= peer.seconds
        # The collective that was waited for is the first to end after the wait.
        later = [each for each in ends[span.name, span.dimension] if each[0] >= span.end]
        awaited = min(later)[1] if later and not inside else None
        if awaited is not None and awaited in last:
            peer_rank, came = last[awaited]
            late = min(max(0.0, came - begin), left)
            if peer_rank != rank and late > 0:
                seconds[span.name, span.dimension, peer_rank] += late
                left -= late
        seconds[span.name, span.dimension, None] += max(0.0, left)
    waits = (
        StepWait(name, over, took, peer) for (name, over, peer), took in seconds.items() if took
    )
    return tuple(sorted(waits, key=lambda wait: -wait.seconds))


_FORMAT = "shardwise timeline 2"
_MOST_RANKS = 1 << 20
#: The device of ranks whose clock counts what happens, a millisecond for each.
SIMULATED = "simulated"


@dataclass(frozen=True)
class Timeline:
    """What ranks did while they were recorded.

    Attributes:
        ranks: the ranks whose recordings are known, in order.
        prediction: what a plan said that a step takes, if there is one.
        format: of the file.
    """

    ranks: tuple[RankTimeline, ...]
    prediction: StepTime | None = None
    format: str = _FORMAT

    @cached_property
    def steps(self) -> list[StepOfAll]:
        """The steps that any rank recorded, in order, and what the time of each went into."""
        found: dict[int, list[tuple[RankTimeline, Step, list[Span]]]] = defaultdict(list)
        for rank in self.ranks:
            for step in rank.steps:
                found[step.number].append((rank, step, rank.of(step)))
        steps = []
        for number, recorded in sorted(found.items()):
            last = _last_to_come([(rank.rank, spans) for rank, _, spans in recorded])
            of_ranks = (_of_rank(rank.rank, step, spans, last) for rank, step, spans in recorded)
            steps.append(StepOfAll(number, tuple(of_ranks)))
        return steps

    @property
    def typical(self) -> StepOfAll | None:
        """The step of median length; ``None`` if no step was recorded.

        The first of several is left out: it warms up.
        """
        later = self.steps[1:] or self.steps
        if not later:
            return None
        middle = median(step.seconds for step in later)
        return min(later, key=lambda step: abs(step.seconds - middle))

    @property
    def missing(self) -> list[int]:
        """The ranks of which nothing is known."""
        known = {rank.rank for rank in self.ranks}
        size = max((rank.world_size for rank in self.ranks), default=0)
        return [rank for rank in range(size) if rank not in known]

    def summary(self) -> str:
        """Describe the typical step.

        Returns:
            One line.
        """
        step = self.typical
        if step is None:
            return "no step was recorded"
        if self.ranks[0].device == SIMULATED:
            return f"a step is {round(step.seconds * 1e3)} events of all ranks; no time was taken"
        waiting = step.part(Part.WAIT)
        words = [
            f"a step takes {units.seconds(step.seconds)}",
            f"{_share(waiting, step)} of it waiting",
        ]
        if len(step.ranks) > 1:
            waited = step.waited_for(slow := step.slowest)
            words.append(
                f"rank {slow} is the slowest: others wait {units.seconds(waited)} for it"
                if waited > 0
                else f"rank {slow} is the slowest"
            )
        if self.prediction is not None:
            words.append(f"{units.seconds(self.prediction.seconds)} were predicted")
        return ", ".join(words)

    @classmethod
    def from_json(cls, value: Any, where: str) -> Timeline:
        """Read a timeline that was written as plain values, of a file that may be damaged.

        Args:
            value: of the file, as ``json`` reads it.
            where: the name of the file, for errors.

        Returns:
            The timeline.

        Raises:
            CheckpointError: it is something else; the message names the file.
        """
        found = Fields(value, where).text("format")
        if found != _FORMAT:
            refuse(where, f"the format {found!r}", _FORMAT)
        try:
            timeline = plain.converted(cls, value)
        except ValueError as error:
            raise CheckpointError(f"{where}: {error}") from None
        for rank in timeline.ranks:
            if not 0 <= rank.rank < rank.world_size <= _MOST_RANKS:
                refuse(where, f"rank {rank.rank} of {rank.world_size}", "a rank of a world")
            if any(step.end < step.begin for step in rank.steps):
                refuse(where, f"a step of rank {rank.rank} that ends first", "a begin and an end")
        return together([timeline])


def together(timelines: Iterable[Timeline]) -> Timeline:
    """Put timelines of different ranks together."""
    known: dict[int, RankTimeline] = {}
    prediction: StepTime | None = None
    for each in timelines:
        known |= {rank.rank: rank for rank in each.ranks}
        prediction = prediction or each.prediction
    return Timeline(tuple(known[rank] for rank in sorted(known)), prediction)


def _share(seconds: float, step: StepOfAll) -> str:
    return f"{100 * seconds / step.seconds:.0f}%" if step.seconds else "0%"
