"""What ranks print: the files that it goes to, and what of these is shown, line by line."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

TAIL_LINES = 20
_STREAMS = "stdout", "stderr"  # bits 1 and 2
_CHUNK = 1 << 20  # bytes that are read at a time
_REDRAWN = 2.0  # seconds between lines of a progress bar, which draws itself anew


@dataclass(frozen=True)
class Shown:
    """What of the output of ranks is shown, and where all of it is kept.

    Attributes:
        tee: as torchrun's: the streams that are shown, 1 for stdout, 2 for stderr, 3 for both, 0
            for none; of all ranks, or as ``0:3,1:2`` of these ranks of this host. None: rank 0
            writes to our own streams, and the others are not shown.
        folder: where the files are kept; None: nowhere, once the job has ended.
    """

    tee: str | None = None
    folder: Path | None = None

    def streams(self, local_rank: int) -> list[str]:
        """Return the streams of a rank that are shown."""
        tee = self.tee or "0"
        if ":" in tee:
            tee = dict(part.split(":") for part in tee.split(",")).get(str(local_rank), "0")
        return [name for bit, name in enumerate(_STREAMS, start=1) if int(tee) & bit]


class NewLines:
    """The lines that a file has got since the last look.

    Args:
        path: the file, which is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        self._read, self._received = 0, b""

    def new(self) -> Iterator[bytes]:
        """Return the complete lines."""
        while chunk := os.pread(self._file.fileno(), _CHUNK, self._read):
            self._read += len(chunk)
            *lines, self._received = (self._received + chunk).split(b"\n")
            yield from lines

    def redrawn(self) -> bytes | None:
        """Return what a progress bar shows, which ends no line."""
        drawn, found, self._received = self._received.rpartition(b"\r")
        self._received = self._received if found else drawn + self._received
        return drawn.rpartition(b"\r")[2] if found else None

    def rest(self) -> bytes:
        """Return the beginning of the last line, which has no end."""
        rest, self._received = self._received, b""
        return rest

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RankOutput:
    """The output of one rank.

    Args:
        rank: its number among all ranks.
        folder: with its files.
        shown: names of the streams that are shown, each line behind the number of the rank.
    """

    def __init__(self, rank: int, folder: Path, shown: Sequence[str]) -> None:
        self._prefix = f"[rank {rank}] "
        self._shown = [(getattr(sys, name), NewLines(folder / f"{name}.log")) for name in shown]
        self._hidden = [folder / f"{name}.log" for name in _STREAMS if name not in shown]
        self._redrawn_at = time.monotonic()

    def show(self) -> None:
        """Show what is new, in whole lines; of a progress bar a line now and then."""
        is_due = time.monotonic() - self._redrawn_at > _REDRAWN
        for stream, lines in self._shown:
            found = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines.new()]
            if is_due and (drawn := lines.redrawn()):
                found.append(drawn)
                self._redrawn_at = time.monotonic()
            self._write(stream, found)

    def show_rest(self) -> None:
        """Show all that is left, when the rank has ended."""
        self.show()
        for stream, lines in self._shown:
            self._write(stream, [rest] if (rest := lines.rest().rpartition(b"\r")[2]) else [])

    def _write(self, stream: TextIO, lines: Sequence[bytes]) -> None:
        text = "".join(f"{self._prefix}{line.decode(errors='replace')}\n" for line in lines)
        print(text, end="", file=stream, flush=bool(lines))

    def tail(self) -> str:
        """Return the last lines that were not shown."""
        found: list[str] = []
        for path in self._hidden:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
                found += file.read().decode(errors="replace").splitlines()
        return "\n".join(found[-TAIL_LINES:])

    def close(self) -> None:
        """Close its files."""
        for _, lines in self._shown:
            lines.close()
