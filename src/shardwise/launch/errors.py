"""Errors of a command, and the lines that it writes for its user."""

from __future__ import annotations

import contextlib
import signal
import sys


class UserError(Exception):
    """An error that the user can fix, shown as one line without a traceback.

    Attributes:
        exit_code: the exit status of the command.
        passing: whether the same command may succeed later, so that ``--max-restarts`` applies.
    """

    exit_code = 2
    passing = False


class Stopped(BaseException):
    """The run was asked to stop (SIGINT, SIGTERM) and did.

    Not an ``Exception``, so that code which handles failures does not catch it.

    Attributes:
        signum: the signal.
        message: what to show the user.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum
        self.message = message

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells and schedulers expect."""
        return 128 + self.signum


def signal_name(signum: int) -> str:
    """Return the name of a signal, ``SIGTERM`` for 15."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def say(text: str) -> None:
    """Write a line to standard error, unless its reader is gone."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
