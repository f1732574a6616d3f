"""What one rank did while it was recorded: a value, and its form in a file.

All times are seconds on the clock that all ranks of the recording share; see ``meeting.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.base.observe import Activity, Memory
from shardwise.checkpoint.disk.strict import MAX_INT, Fields, refuse
from shardwise.insight.planning.events import Span

#: Activities that are collectives.
COLLECTIVES = frozenset(
    {Activity.ALL_GATHER, Activity.REDUCE_SCATTER, Activity.ALL_REDUCE, Activity.ALL_TO_ALL}
)

_MOST = 1 << 24  # spans or changes in a file
_MOST_RANKS = 1 << 20
_LATEST = 1e12  # seconds: no clock is further
_PLACES = 7  # decimal places of a time: 0.1 microseconds


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Memory grew, or shrank if ``nbytes`` is negative.

    Attributes:
        time: when.
        kind: what the memory is for.
        name: of the group, or of the parameter.
        nbytes: by how much.
    """

    time: float
    kind: Memory
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One training step of a rank.

    Attributes:
        number: which one; the same on every rank.
        begin: when it began.
        end: when it ended.
    """

    number: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """What one rank did.

    Attributes:
        rank: the rank.
        world_size: how many there were.
        host: the name of its host.
        device: what it computed on, such as ``"cpu"``.
        begin: when the recording began.
        end: when it ended.
        spans: what took time, ordered by begin.
        changes: of memory, in order.
        held: bytes of each kind when the recording began, as far as that is known.
        steps: in order.
        dropped: how many of the oldest spans and changes were dropped, for lack of room.
        error: the exception that ended the recording; ``""``: none.
        uncertainty: seconds by which its clock may be off against that of rank 0.
    """

    rank: int
    world_size: int
    host: str
    device: str
    begin: float
    end: float
    spans: tuple[Span, ...]
    changes: tuple[MemoryChange, ...] = ()
    held: Mapping[Memory, int] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    dropped: int = 0
    error: str = ""
    uncertainty: float = 0.0

    def of(self, step: Step) -> list[Span]:
        """Return the spans that overlap a step."""
        return [
            span
            for span in self.spans
            if span.begin < step.end and (span.end is None or span.end > step.begin)
        ]

    # -- in a file --------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return plain values. Names stand in one list, and spans in columns."""
        names: dict[str, int] = {}

        def number(name: str) -> int:
            return names.setdefault(name, len(names))

        spans = [
            [
                number(span.activity.value),
                number(span.name),
                _round(span.begin),
                None if span.end is None else _round(span.end),
                number(span.dimension),
                span.nbytes,
                span.thread,
                number(span.transport),
                span.launches,
                list(span.members),
                None if span.device is None else [_round(time) for time in span.device],
            ]
            for span in self.spans
        ]
        changes = [
            [_round(c.time), number(c.kind.value), number(c.name), c.nbytes] for c in self.changes
        ]
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": self.host,
            "device": self.device,
            "begin": _round(self.begin),
            "end": _round(self.end),
            "steps": [[s.number, _round(s.begin), _round(s.end)] for s in self.steps],
            "spans": spans,
            "changes": changes,
            "held": {kind.value: nbytes for kind, nbytes in self.held.items()},
            "dropped": self.dropped,
            "error": self.error,
            "uncertainty": self.uncertainty,
            "names": list(names),
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> RankTimeline:
        """Read what :meth:`to_json` returned.

        Args:
            value: plain values, of a file that may be damaged.
            where: the file, for errors.

        Raises:
            CheckpointError: they are something else.
        """
        fields = Fields(value, where)
        world_size = fields.number("world_size", 1, _MOST_RANKS)
        rank = fields.number("rank", 0, world_size - 1)
        at = f"{where}, rank {rank}"
        try:
            # A dict, which knows no negative numbers.
            names = {number: str(name) for number, name in enumerate(value["names"])}
            spans = tuple(_span(row, names) for row in value["spans"][:_MOST])
            changes = tuple(
                MemoryChange(time_of(time), Memory(names[kind]), names[name], _signed(nbytes))
                for time, kind, name, nbytes in value["changes"][:_MOST]
            )
            return cls(
                rank=rank,
                world_size=world_size,
                host=str(value["host"]),
                device=str(value["device"]),
                begin=time_of(value["begin"]),
                end=time_of(value["end"]),
                spans=spans,
                changes=changes,
                held={Memory(kind): _signed(nbytes) for kind, nbytes in value["held"].items()},
                steps=tuple(_step(row) for row in value["steps"]),
                dropped=_signed(value["dropped"]),
                error=str(value["error"]),
                uncertainty=time_of(value["uncertainty"]),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            refuse(at, "other values", "what a recording writes")


def _round(time: float) -> float:
    return round(time, _PLACES)


def time_of(value: Any) -> float:
    """Read seconds on a clock.

    Raises:
        ValueError: it is no number, or one of no clock.
    """
    if type(value) not in (int, float) or not -_LATEST <= value <= _LATEST:
        raise ValueError("expected seconds")
    return float(value)


def _signed(value: Any) -> int:
    """Read an integer that arithmetic and pictures can go on with."""
    if type(value) is not int or abs(value) > MAX_INT:
        raise ValueError("expected an integer")
    return value


def _step(row: Sequence[Any]) -> Step:
    number, begin, end = row
    step = Step(_signed(number), time_of(begin), time_of(end))
    if step.end < step.begin:
        raise ValueError("expected an end behind the begin")
    return step


def _span(row: Sequence[Any], names: Mapping[int, str]) -> Span:
    activity, name, begin, end, dimension, nbytes, thread, transport, launches, members, on = row
    return Span(
        activity=Activity(names[activity]),
        name=names[name],
        begin=time_of(begin),
        end=None if end is None else time_of(end),
        dimension=names[dimension],
        nbytes=_signed(nbytes),
        thread=_signed(thread),
        transport=names[transport],
        launches=_signed(launches),
        members=tuple(_signed(member) for member in members),
        device=None if on is None else (time_of(on[0]), time_of(on[1])),
    )
