"""How a rank or a run ends that was asked to stop."""

from __future__ import annotations

import signal
from typing import Any


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
