"""Lines of numbers, such as ``metrics.jsonl``: what one says, and following a file that grows."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.files import open_file
from shardwise.checkpoint.disk.strict import Fields, parse, refuse

MAX_LINE = 1 << 20  # bytes; whatever has more was not written by a training
_NUMBERS = (int, float)  # a union would be made anew for each value of a million lines
_LARGEST = sys.float_info.max
_CHUNK = 1 << 20  # bytes that are read at a time
_LONGEST = 1 << 24  # bytes of a line that is left out; a file with more in one is none of ours
MOST_BYTES = 1 << 32  # of a file: ten million steps have fewer
_REMEMBERED = 256  # bytes before the place that was read to, which tell whether the file was cut


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Return what a line says: ``step``, and numbers or None by name.

    Args:
        line: the line.
        where: the file and the number of the line, for errors.

    Raises:
        CheckpointError: it says something else.
    """
    if len(line) > MAX_LINE:
        refuse(where, f"more than {MAX_LINE:,} bytes", "a line of numbers")
    fields = Fields(parse(line, where), where)
    fields.number("step")
    found = fields.all()
    for name, value in found.items():
        # An integer may be larger than any that arithmetic, and a picture, can go on with.
        if value is None or (isinstance(value, _NUMBERS) and -_LARGEST <= value <= _LARGEST):
            continue
        refuse(f"{where}, {name!r}", value, "a number")
    return found


def without_nan(value: Any) -> Any:
    """Return plain values with None for NaN and infinities, which JSON cannot hold."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {name: without_nan(each) for name, each in value.items()}
        case list() | tuple():
            return [without_nan(each) for each in value]
    return value


class Follower:
    """Reads what a file of lines gains, each line once.

    A training that resumes cuts off the lines behind its checkpoint. So the last bytes that were
    read are compared each time, and if they have changed, reading begins anew.

    Args:
        path: the file, which need not exist yet.
        begin: called before the first line, and again if reading begins anew.
        line: called with each line, without its end, and its number from 1.
        at_once: bytes after which one reading ends; the next one goes on.

    Attributes:
        left: bytes that were not read for that reason.
    """

    def __init__(
        self,
        path: Path,
        begin: Callable[[], object],
        line: Callable[[bytes, int], object],
        at_once: int = MOST_BYTES,
    ) -> None:
        self._path = path
        self._at_once = at_once
        self._begin = begin
        self._line = line
        self._restart()

    def _restart(self) -> None:
        self._begin()
        self._end = self.left = 0
        self._number = 0
        self._remembered = b""

    def read(self) -> None:
        """Read the complete lines that have come since the last call.

        Raises:
            CheckpointError: the file cannot be read, is not a regular file, or is far larger than
                what a training writes, in all or in one line.
        """
        if not os.path.lexists(self._path):
            self._restart()
            return
        handle, size = open_file(self._path)
        with os.fdopen(handle, "rb") as file:
            if size > MOST_BYTES:  # it may be one hole, which takes minutes to read
                refuse(str(self._path), f"{size:,} bytes", f"at most {MOST_BYTES:,}")
            try:
                before = self._end - len(self._remembered)
                file.seek(before)
                if size < self._end or file.read(len(self._remembered)) != self._remembered:
                    self._restart()
                    file.seek(0)
                until = self._end + self._at_once
                self._read_lines(file, until)
                self.left = max(0, size - self._end) if self._end >= until else 0
            except OSError as error:
                raise CheckpointError(f"{self._path}: cannot be read ({error.strerror})") from None

    def _read_lines(self, file: Any, until: int) -> None:
        while self._end < until and (line := file.readline(MAX_LINE + 1)):
            length = len(line)
            while not line.endswith(b"\n"):  # too long, or not complete yet
                rest = file.readline(_CHUNK)
                if not rest:
                    return
                length += len(rest)
                if length > _LONGEST:
                    where = f"{self._path}, line {self._number + 1:,}"
                    refuse(where, f"more than {_LONGEST:,} bytes", f"at most {MAX_LINE:,}")
                line = line[:MAX_LINE] + b"x" + rest[-1:]
            self._number += 1
            self._end += length
            self._remembered = (self._remembered + line)[-_REMEMBERED:]
            if length > MAX_LINE:
                self._remembered = b""  # of such a line only the beginning was kept
            self._line(line[:-1], self._number)
