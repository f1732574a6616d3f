"""What simulated ranks do, in the order in which they do it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from shardwise.base import observe
from shardwise.base.observe import Activity, Memory, Route
from shardwise.insight.simulated.turns import RankTurns
from shardwise.insight.timeline.recorder import Recorder, watching_optimizers
from shardwise.insight.timeline.steps import Timeline

#: Spans, and changes of memory, that are kept of a rank.
_SPANS = 20_000
#: Nanoseconds of a clock that goes on with everything that happens.
_TICK = 1_000_000


class RankRecorders:
    """An observer that remembers what each rank does.

    Args:
        turns: of the ranks.
    """

    def __init__(self, turns: RankTurns) -> None:
        ticks = itertools.count(0, _TICK)
        self._turns = turns
        self._ranks = [Recorder(_SPANS, now=lambda: next(ticks)) for _ in range(turns.world_size)]
        self._elsewhere = Recorder(1, now=lambda: 0)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside the block, unless someone else does."""
        with observe.standing_by(self), watching_optimizers(self._recorder):
            for each in self._ranks:
                each.start()
            try:
                yield
            finally:
                for each in self._ranks:
                    each.finish()

    def timeline(self) -> Timeline:
        """Return what was recorded. A millisecond stands for one thing that happened."""
        size = len(self._ranks)
        return Timeline(
            tuple(
                each.timeline(rank, size, "simulated", shared=lambda time: time / 1e9)
                for rank, each in enumerate(self._ranks)
            )
        )

    def _recorder(self) -> Recorder:
        return self._ranks[self._turns.rank] if self._turns.is_rank() else self._elsewhere

    def begin(self, activity: Activity, name: str, dimension: str, nbytes: int) -> int:
        """Note that an activity begins."""
        return self._recorder().begin(activity, name, dimension, nbytes)

    def collective(
        self, activity: Activity, name: str, wire: Route, nbytes: int, launches: int
    ) -> int:
        """Note that a collective is issued."""
        return self._recorder().collective(activity, name, wire, nbytes, launches)

    def end(self, number: int) -> None:
        """Note that an activity has ended."""
        self._recorder().end(number)

    def memory(self, kind: Memory, name: str, nbytes: int) -> None:
        """Note that memory has grown or shrunk."""
        self._recorder().memory(kind, name, nbytes)
