"""One rank, as the launcher that started it sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import IO

from shardwise.launch.report import Ending, Report, Stage

TAIL_LINES = 20


class LocalRank:
    """One child process, its pipe for a :class:`Report` and its output."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], pipe: int, output: IO[bytes]
    ) -> None:
        self.rank = rank
        self.process = process
        self.report: Report | None = None
        self.stage: Stage | None = None
        self.stepped = False
        self.ended_at = 0.0
        self._pipe = pipe
        self._received = b""
        self._output = output

    @property
    def code(self) -> int | None:
        """The exit code as Popen has it (-9 for SIGKILL), None while running."""
        return self.process.returncode

    def look(self) -> None:
        """Take in what happened since the last look."""
        if self.code is None and self.process.poll() is not None:
            self.ended_at = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 65536):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            stage = Stage.from_line(line)
            if stage is not None:
                self.stage = stage
                self.stepped |= stage is Stage.TRAINING
            elif self.report is None:
                self.report = Report.from_json(line)

    @property
    def failed(self) -> bool:
        """Whether this rank ended, or is about to end, with an error."""
        if self.report is not None:
            return self.report.ending is not Ending.STOPPED
        return self.code is not None and self.code != 0

    @property
    def stopped(self) -> bool:
        """Whether this rank stopped because a signal asked it to."""
        return self.report is not None and self.report.ending is Ending.STOPPED

    @property
    def is_echo(self) -> bool:
        """Whether this rank failed only because another one went first."""
        return self.report is not None and self.report.ending is Ending.PEER

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds on the monotonic clock."""
        return self.ended_at if self.report is None else self.report.time

    def kill(self) -> None:
        """End it now, and wait until it has gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """The last lines that this rank wrote (nothing for rank 0, which writes to our own)."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 16384))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self) -> None:
        """Give back its descriptors."""
        os.close(self._pipe)
        self._output.close()
