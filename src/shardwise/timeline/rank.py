"""What one rank did while it was recorded.

All times are seconds on the clock that all ranks of the recording share; see ``meeting.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.base.observe import Activity, Memory
from shardwise.base.spans import Span

#: Activities that are collectives.
COLLECTIVES = frozenset(
    {Activity.ALL_GATHER, Activity.REDUCE_SCATTER, Activity.ALL_REDUCE, Activity.ALL_TO_ALL}
)


class MemoryChange(NamedTuple):
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


class Step(NamedTuple):
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
    held: dict[Memory, int] = field(default_factory=dict)
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
