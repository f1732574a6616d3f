"""Errors of a command, and the lines that it writes for its user."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Any


class UserError(Exception):
    """An error that the user can fix, shown as one line without a traceback.

    Attributes:
        exit_code: the exit status of the command.
        passing: whether the same command may succeed later, so that ``--max-restarts`` applies.
    """

    exit_code = 2
    passing = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray hands it to the program that started the job. Classes of errors take what they
        # describe; only the text is in ``args``.
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class Stopped(BaseException):
    """The run was asked to stop (SIGINT, SIGTERM) and did.

    Not an ``Exception``, so that code which handles failures does not catch it.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum

    def __reduce__(self) -> tuple[Any, ...]:
        return BaseException.__new__, (type(self), *self.args), self.__dict__

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells and schedulers expect."""
        return 128 + self.signum


class MovedOn(Stopped):
    """The job goes on over other hosts, and this rank with it: it waits for its next world.

    Attributes:
        departure: what the rank takes there; ``None``: nothing, for all is saved.
    """

    def __init__(self, signum: int, message: str, departure: Any) -> None:
        super().__init__(signum, message)
        self.departure = departure


class Parted(MovedOn):
    """Other ranks have left. What this one takes into its next world is saved, too."""


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
