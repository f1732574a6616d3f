"""Streams and events as vector clocks: what is known to have happened before what.

Every *timeline* (a thread of the host, or a stream of the device) counts what happens on it. Its
clock holds, for each timeline, how much of it is known to be over. Waiting joins clocks:

    host       launch A          launch B                      host.clock = {host: 2}
    compute       A (compute: 1)                               compute.clock = {host: 1, compute: 1}
    side                            wait for compute, then B   side.clock = {compute: 1, side: 1}

Two accesses to the same memory are ordered if the timeline of the later one knows of the earlier
one. If it does not, they race.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """A point on a timeline.

    Attributes:
        timeline: the name of the timeline.
        time: how much had happened on it.
    """

    timeline: str
    time: int


class Clock:
    """How much of each timeline is known to be over."""

    __slots__ = ("_times",)

    def __init__(self, times: dict[str, int] | None = None) -> None:
        self._times = dict(times or {})

    def copy(self) -> Clock:
        """Return what is known now."""
        return Clock(self._times)

    def join(self, other: Clock) -> None:
        """Learn what ``other`` knows."""
        mine = self._times
        for timeline, time in other._times.items():
            if time > mine.get(timeline, 0):
                mine[timeline] = time

    def knows(self, moment: Moment) -> bool:
        """Whether ``moment`` is known to be over."""
        return self._times.get(moment.timeline, 0) >= moment.time

    def advance(self, timeline: str) -> Moment:
        """Count one more happening on ``timeline``."""
        time = self._times[timeline] = self._times.get(timeline, 0) + 1
        return Moment(timeline, time)

    def __repr__(self) -> str:
        return f"Clock({self._times})"


class Timeline:
    """What happens one after the other.

    Attributes:
        name: a name of its own.
        clock: what is known to be over when the next thing happens.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = Clock()

    def tick(self) -> Moment:
        """Count one more happening."""
        return self.clock.advance(self.name)

    def wait_for(self, clock: Clock) -> None:
        """Let all that follows happen after what ``clock`` knows."""
        self.clock.join(clock)

    def __repr__(self) -> str:
        return f"<{self.name}>"
