"""What a rank tells its launcher: how far it is, and how it ends if that is for a reason.

Lines on a pipe of the rank's own: a :class:`Stage` each, then one JSON object, the
:class:`Report`. The time that it carries is the machine's monotonic
clock, which all processes of a host share: so the launcher can tell which rank failed first.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from dataclasses import asdict, dataclass, field

# Characters. Long enough for a traceback; short enough, at four bytes each, for the buffer of a
# pipe, so that a rank which dies never waits for its launcher.
MAX_TEXT = 14 * 1024


class Stage(enum.Enum):
    """How far a rank is, for a launcher that may want it to stop and go on later."""

    TRAINING = "training"  # it has made a step; asked to stop, it saves
    ENDING = "ending"  # it makes no more steps; what there was to save is saved

    @staticmethod
    def from_line(line: bytes) -> Stage | None:
        """The stage that a line names, if it is none of a report."""
        return next((stage for stage in Stage if stage.value.encode() == line), None)

    def send(self, fd: int) -> None:
        """Write to the launcher's pipe."""
        _send(fd, self.value)


class Ending(enum.Enum):
    """Why a rank ended."""

    STOPPED = "stopped"  # asked to, by a signal
    USER = "user"  # an error its user can put right
    FAILED = "failed"  # any other error
    PEER = "peer"  # another rank went first


@dataclass(frozen=True)
class Report:
    """How one rank ended.

    Attributes:
        rank: the global rank.
        ending: why.
        exit_code: the status that the process is about to exit with.
        text: one line for ``USER`` and ``STOPPED``, a traceback otherwise.
        time: seconds on the host's monotonic clock.
    """

    rank: int
    ending: Ending
    exit_code: int
    text: str
    time: float = field(default_factory=time.monotonic)

    def to_json(self) -> str:
        """One line of JSON; the middle of a text that is too long is left out."""
        text = self.text
        if len(text) > MAX_TEXT:
            half = MAX_TEXT // 2
            text = f"{text[:half]}\n  [...]\n{text[-half:]}"
        fields = {**asdict(self), "ending": self.ending.value, "text": text}
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(line: str | bytes) -> Report:
        """Read back what :meth:`to_json` wrote."""
        fields = json.loads(line)
        return Report(**{**fields, "ending": Ending(fields["ending"])})

    def send(self, fd: int) -> None:
        """Write to the launcher's pipe."""
        _send(fd, self.to_json())


def _send(fd: int, line: str) -> None:
    with contextlib.suppress(OSError):  # a launcher that is gone is not an error
        os.write(fd, line.encode() + b"\n")
