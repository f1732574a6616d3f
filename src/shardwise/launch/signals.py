"""SIGINT and SIGTERM in a rank: leave at once, or finish the step first.

Before training and after it there is nothing to save: a signal raises :class:`Stopped` where the
rank stands. Inside ``with signals.deferred():`` it is only noted, for the training loop to read
between steps.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from shardwise.launch.errors import Stopped, signal_name
from shardwise.launch.report import Stage

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """The stop signals of this process. Make one, in the main thread.

    Args:
        tell: tells the launcher when it may send one and lose nothing.
    """

    def __init__(self, tell: Callable[[Stage], None] | None = None) -> None:
        self._noted = 0
        self._deferred = False
        self._tell = tell
        self._stage: Stage | None = None

    def install(self) -> None:
        """Take over the signals, and unblock them where a launcher blocked them."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def noted(self) -> int:
        """The first stop signal that came while deferred, or 0."""
        return self._noted

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals instead of raising."""
        self._deferred = True
        try:
            yield
        finally:
            self._reach(Stage.ENDING)
            self._deferred = False

    def stepped(self) -> None:
        """A step was made: whoever asks to stop from here on finds all of it saved."""
        self._reach(Stage.TRAINING)

    def _reach(self, stage: Stage) -> None:
        if self._tell is not None and stage is not self._stage:
            self._tell(stage)
        self._stage = stage

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        # A terminal sends Ctrl-C to every process of the job and the launcher forwards it too:
        # only the first counts.
        if self._noted:
            return
        self._noted = signum
        if not self._deferred:
            raise Stopped(signum, f"Stopped by {signal_name(signum)}; there was nothing to save.")
