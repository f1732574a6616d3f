"""``metrics.jsonl``: a line for each step, cut back to where a run resumes, and read again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.files import open_file
from shardwise.runs.files import naming
from shardwise.runs.metrics import MAX_LINE, parse_line, without_nan


class MetricsFile:
    """``metrics.jsonl``, open for appending.

    Args:
        path: the file.
        last_step: what comes after the lines of this step is cut off first, readable or not: a
            run that was killed may have gone on after the checkpoint it resumes from.

    Raises:
        UserError: a line before is damaged.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        if os.path.lexists(path):
            _cut(path, last_step)
        self._path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; readers see it at once."""
        with naming(self._path):
            self._file.write(json.dumps(without_nan(record), allow_nan=False) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Flush what was written to disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, after another try to write what could not be written."""
        with naming(self._path):
            self._file.close()


def read_metrics(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``, without a last one that is unfinished.

    Args:
        path: the file.
        last_step: end after the lines of this step; None: with the file.

    Raises:
        UserError: another line is damaged.
    """
    return [record for record, _ in _lines(path, last_step)]


def check_metrics(path: Path, last_step: int) -> None:
    """Check that the lines of a ``metrics.jsonl`` up to a step are readable.

    Raises:
        UserError: a line is damaged, or it is no file.
    """
    if os.path.lexists(path):
        for _ in _lines(path, last_step):
            pass


def _cut(path: Path, last_step: int) -> None:
    """Cut off everything after the lines of a step."""
    end = max((end for _, end in _lines(path, last_step)), default=0)
    with path.open("r+b") as file:
        file.truncate(end)
        file.seek(max(0, end - 1))
        if file.read() not in (b"", b"\n"):  # it was cut short behind its last bracket
            file.write(b"\n")


def _lines(path: Path, last_step: int | None = None) -> Iterator[tuple[dict[str, Any], int]]:
    """The lines up to those of a step, or all; without a last one that was left unfinished.

    Yields:
        What a line says, and the byte behind it.

    Raises:
        UserError: a line is damaged that belongs to them.
    """
    try:
        handle, _ = open_file(path)
        with os.fdopen(handle, "rb") as file:
            number, end, reached = 0, 0, last_step == 0
            while line := file.readline(MAX_LINE + 1):
                number, end = number + 1, end + len(line)
                try:
                    record = parse_line(line, f"{path}, line {number}")
                except CheckpointError:
                    if reached or not (line.endswith(b"\n") or len(line) > MAX_LINE):
                        return
                    raise
                if last_step is not None and record["step"] > last_step:
                    return
                reached = reached or record["step"] == last_step
                yield record, end
    except CheckpointError as error:
        raise UserError(str(error)) from None
