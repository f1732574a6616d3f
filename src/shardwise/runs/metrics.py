"""Lines of numbers, such as ``metrics.jsonl``: what one says, and following a file that grows."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shardwise.base.errors import CheckpointError
from shardwise.base.files import open_file
from shardwise.base.strict import Fields, parse, refuse
from shardwise.runs.files import naming

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


@dataclass
class Follower:
    """Reads what a file of lines gains, each line once.

    A training that resumes cuts off the lines behind its checkpoint. So the last bytes that were
    read are compared each time, and if they have changed, reading begins anew.

    Attributes:
        path: the file, which need not exist yet.
        begin: called before the first line, and again if reading begins anew.
        line: called with each line, without its end, and its number from 1.
        at_once: bytes after which one reading ends; the next one goes on.
        left: bytes that were not read for that reason.
    """

    path: Path
    begin: Callable[[], object]
    line: Callable[[bytes, int], object]
    at_once: int = MOST_BYTES
    left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.begin()
        self._end = self.left = 0
        self._number = 0
        self._remembered = b""

    def read(self) -> None:
        """Read the complete lines that have come since the last call.

        Raises:
            CheckpointError: the file cannot be read, is not a regular file, or is far larger than
                what a training writes, in all or in one line.
        """
        if not os.path.lexists(self.path):
            self._restart()
            return
        handle, size = open_file(self.path)
        with os.fdopen(handle, "rb") as file:
            if size > MOST_BYTES:  # it may be one hole, which takes minutes to read
                refuse(str(self.path), f"{size:,} bytes", f"at most {MOST_BYTES:,}")
            try:
                before = self._end - len(self._remembered)
                file.seek(before)
                if size < self._end or file.read(len(self._remembered)) != self._remembered:
                    self._restart()
                    file.seek(0)
                until = self._end + self.at_once
                self._read_lines(file, until)
                self.left = max(0, size - self._end) if self._end >= until else 0
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _read_lines(self, file: Any, until: int) -> None:
        while self._end < until and (line := file.readline(MAX_LINE + 1)):
            length = len(line)
            while not line.endswith(b"\n"):  # too long, or not complete yet
                rest = file.readline(_CHUNK)
                if not rest:
                    return
                length += len(rest)
                if length > _LONGEST:
                    where = f"{self.path}, line {self._number + 1:,}"
                    refuse(where, f"more than {_LONGEST:,} bytes", f"at most {MAX_LINE:,}")
                line = line[:MAX_LINE] + b"x" + rest[-1:]
            self._number += 1
            self._end += length
            self._remembered = (self._remembered + line)[-_REMEMBERED:]
            if length > MAX_LINE:
                self._remembered = b""  # of such a line only the beginning was kept
            self.line(line[:-1], self._number)


MOST_RANKS = 256  # that a line lists, the busiest ones
_SECONDS = 10.0  # between lines, at first
_SHARE = 100  # of the time of a run that passes between lines: a long one has few hundreds
_KEPT = 60  # lines that a page shows


@dataclass(frozen=True)
class RankStep:
    """A step of one rank, as it says itself.

    Attributes:
        seconds: since the exchange of the step before.
        waited: of these, waiting for other ranks.
        data: of these, waiting for its batches.
        memory_mib: its peak memory so far.
    """

    seconds: float
    waited: float
    data: float
    memory_mib: float


class RanksFile:
    """Writes ``ranks.jsonl``: a line for the mean of the steps since the last one.

    A rank that is slow lets all others wait, and so waits least itself. So a line has the seconds
    of a step in which a rank did *not* wait.

    Args:
        path: the file, which is appended to.
        clock: seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._clock = clock
        self._began = self._last = clock()
        self._steps = 0  # since the last line
        self._sums: list[tuple[float, float, float]] = []  # of ranks: seconds, waited, data

    def step(self, step: int, ranks: Sequence[RankStep]) -> None:
        """Add a step of all ranks, in rank order; write a line if it is time."""
        if len(self._sums) != len(ranks):
            self._steps, self._sums = 0, [(0.0, 0.0, 0.0)] * len(ranks)
        self._steps += 1
        self._sums = [
            (seconds + each.seconds, waited + each.waited, data + each.data)
            for (seconds, waited, data), each in zip(self._sums, ranks, strict=True)
        ]
        now = self._clock()
        if now - self._last >= max(_SECONDS, (now - self._began) / _SHARE):
            self._last = now
            self._write(step, ranks)

    def _write(self, step: int, ranks: Sequence[RankStep]) -> None:
        sums, count = self._sums, self._steps
        busy = [(seconds - waited) / count for seconds, waited, _ in sums]
        shown = sorted(range(len(ranks)), key=lambda rank: -busy[rank])[:MOST_RANKS]
        shown.sort()
        record = {
            "step": step,
            "seconds": _brief(max(seconds for seconds, *_ in sums) / count),
            "world_size": len(ranks),
            "ranks": shown,
            "busy": [_brief(busy[rank]) for rank in shown],
            "data": [_brief(sums[rank][2] / count) for rank in shown],
            "memory_mib": [_brief(ranks[rank].memory_mib) for rank in shown],
        }
        self._steps, self._sums = 0, []
        with naming(self._path):
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self, step: int = 0, ranks: Sequence[RankStep] = ()) -> None:
        """Close the file, after a line about the steps since the last one."""
        try:
            if self._steps and len(self._sums) == len(ranks):
                self._write(step, ranks)
        finally:
            self._file.close()


def _brief(value: float) -> float:
    return float(f"{value:.4g}")


class RanksReader:
    """Follows ``ranks.jsonl``.

    Args:
        path: the file.
        at_once: bytes after which one reading ends; the next one goes on.
    """

    def __init__(self, path: Path, at_once: int = MOST_BYTES) -> None:
        self._lines: list[dict[str, Any]] = []
        self._follower = Follower(path, self._lines.clear, self._line, at_once)

    def read(self) -> list[dict[str, Any]]:
        """Return the newest lines, oldest first. Damaged ones are left out.

        Raises:
            CheckpointError: the file cannot be read.
        """
        self._follower.read()
        return list(self._lines)

    def _line(self, line: bytes, number: int) -> None:
        try:
            record = _parsed(line, f"line {number}")
        except CheckpointError:
            return
        # A run that was resumed repeats steps.
        kept = [each for each in self._lines if each["step"] < record["step"]]
        self._lines[:] = [*kept, record][-_KEPT:]


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    fields = Fields(parse(line, where), where)
    ranks = list(fields.numbers("ranks", MOST_RANKS))
    found: dict[str, Any] = {
        "step": fields.number("step"),
        "seconds": fields.real("seconds"),
        "world_size": fields.number("world_size"),
        "ranks": ranks,
    }
    for name in ("busy", "data", "memory_mib"):
        values = fields.items(name, MOST_RANKS)
        is_right = all(type(v) in (int, float) and math.isfinite(v) for v in values)
        if not is_right or len(values) != len(ranks):
            refuse(f"{where}, {name!r}", values, "a number for each rank")
        found[name] = list(values)
    return found
