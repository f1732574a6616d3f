"""How the ranks of a host ended."""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Iterator
from dataclasses import dataclass

STOP_GRACE = 30.0  # seconds for the other ranks to stop after the first one has


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Let the system tell how child processes end during the context.

    It tells nothing to a process that ignores SIGCHLD, which is inherited from whatever starts it:
    a rank that was killed would seem to have ended well.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


class Result(enum.Enum):
    """How the ranks of a host ended."""

    COMPLETED = "completed"  # all of them, or they stopped in order
    FAILED = "failed"  # another attempt would fail too, or is not wanted
    CRASHED = "crashed"  # killed, or by an error that may not happen again
    SECONDARY = "secondary"  # only because ranks of other hosts failed first

    @property
    def is_failure(self) -> bool:
        """Whether the ranks did not end well."""
        return self is not Result.COMPLETED

    @property
    def may_restart(self) -> bool:
        """Whether another attempt may end better."""
        return self in (Result.CRASHED, Result.SECONDARY)


class StoppedBy(enum.Enum):
    """What asked the ranks of a host to stop."""

    NOTHING = "nothing"
    RANK = "rank"  # a signal to a rank, or hosts that join
    INTERRUPT = "interrupt"  # SIGINT to the launcher
    TERMINATE = "terminate"  # SIGTERM to the launcher


@dataclass(frozen=True)
class Outcome:
    """How a run of local ranks ended.

    Attributes:
        exit_code: 0, or the exit code of the rank that failed first (128 + signal for one that a
            signal killed), or 128 + signal when the run was stopped.
        result: how the ranks ended.
        stopped_by: what asked them to stop.
        farewell: the last words of a rank that stopped. Whether they are true depends on whether
            the job has ended.
    """

    exit_code: int
    result: Result = Result.COMPLETED
    stopped_by: StoppedBy = StoppedBy.NOTHING
    farewell: str = ""
