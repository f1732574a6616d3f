"""What a rank tells its launcher when it ends for a reason.

One JSON object on a pipe of the rank's own. The time it carries is the machine's monotonic
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
        """Write to the launcher's pipe. A launcher that is gone is not an error."""
        with contextlib.suppress(OSError):
            os.write(fd, self.to_json().encode() + b"\n")
