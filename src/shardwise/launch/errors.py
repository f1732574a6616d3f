"""Errors of a command, and the lines that it writes for its user."""

from __future__ import annotations

import contextlib
import signal
import sys


class UserError(Exception):
    """What its user can put right: shown as one line, without a traceback.

    Attributes:
        exit_code: the exit status of the command.
        passing: whether the same may succeed later, so that ``--max-restarts`` begins again.
    """

    exit_code = 2
    passing = False


class Stopped(BaseException):
    """The run was asked to stop (SIGINT, SIGTERM) and did.

    Not an ``Exception``, so that nothing which handles failures takes it for one.

    Attributes:
        signum: the signal that asked.
        message: what to tell the user.
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
    """The name of a signal, ``SIGTERM`` for 15."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def say(text: str) -> None:
    """Write a line to standard error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
