"""What ranks are doing that have not completed a step for a long time.

Before the first step a rank imports, connects, reads and loads, and prints nothing meanwhile. A
wait that never ends looks the same. So a launcher that has waited for long asks its ranks where
they are, by SIGQUIT, and says it. A rank writes the stack of its main thread to a file of its own,
by :mod:`faulthandler`, which works wherever the rank is: also inside of a library that never
returns. Stacks of other threads are left out: they change while they are read, which may crash.

    starting   no step for 60 s: rank 1 in recv (socket.py:70) < answer (peers.py:12) < ...
"""

from __future__ import annotations

import faulthandler
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from shardwise.elastic.clock import process_clock

PATIENCE = 60.0  # seconds until ranks are asked for the first time
_GROWTH = 4  # how much longer it is each time until they are asked again
_WRITING = 0.5  # seconds within which a rank writes its stacks
_DEPTH = 8  # frames of a stack that are shown
_ASK = signal.SIGQUIT
STACKS = "stacks"  # the file, beside the report

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')


def answer_to(report: Path) -> None:
    """Write where this process is, whenever the launcher asks, to a file beside its report.

    Raises:
        OSError: there is no such file. A request now would end the process.
    """
    stacks = report.with_name(STACKS).open("a")
    faulthandler.register(_ASK, file=stacks, all_threads=False, chain=False)
    _open.append(stacks)


#: Never closed: they live as long as the process.
_open: list[IO[str]] = []


def where(stacks: str) -> str:
    """Return on one line where a thread is, its innermost frame first.

    Args:
        stacks: what :mod:`faulthandler` wrote; of several times, the last counts.
    """
    _, _, last = stacks.rstrip().rpartition("(most recent call first):\n")
    found = [_FRAME.fullmatch(line) for line in last.splitlines()]
    frames = [
        f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})" for frame in found if frame
    ]
    shown = " < ".join(frames[:_DEPTH])
    return f"{shown} < ..." if len(frames) > _DEPTH else shown


class Starting(Protocol):
    """A rank, as far as this file knows one."""

    rank: int

    @property
    def is_starting(self) -> bool:
        """Whether the rank runs, can be asked, and has not completed a step."""

    def send(self, signum: int) -> None:
        """Send a signal."""

    def stacks(self) -> str:
        """Return the stacks that it has written so far."""


class StartWatch:
    """Watches how long ranks take until their first step.

    Args:
        ranks: of this host, just started.
        say: tells the user a line.
        clock: in seconds; by default that of this process, which may be suspended with its ranks.
    """

    def __init__(
        self,
        ranks: Sequence[Starting],
        say: Callable[[str], object],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ranks, self._say = ranks, say
        self._clock = clock or process_clock().now
        self._began = self._clock()
        self._patience = PATIENCE
        self._asked: dict[int, int] = {}  # by rank, the length of its stacks before it was asked
        self._asked_at = 0.0

    def look(self) -> None:
        """Ask the ranks if it is time, and say what they have answered. Call it often."""
        now = self._clock()
        if self._asked:
            if now - self._asked_at >= _WRITING:
                self._tell(now)
        elif now - self._began >= self._patience:
            self._patience *= _GROWTH
            waiting = [rank for rank in self._ranks if rank.is_starting]
            self._asked = {rank.rank: len(rank.stacks()) for rank in waiting}
            self._asked_at = now
            for rank in waiting:
                rank.send(_ASK)

    def _tell(self, now: float) -> None:
        asked, self._asked = self._asked, {}
        places: dict[str, list[int]] = {}
        for rank in self._ranks:
            if rank.rank in asked and rank.is_starting:
                place = where(rank.stacks()[asked[rank.rank] :]) or "a place that it does not tell"
                places.setdefault(place, []).append(rank.rank)
        for place, ranks in places.items():
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            self._say(f"starting   no step for {now - self._began:.0f} s: {who} in {place}")
