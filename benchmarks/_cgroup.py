"""Groups of processes with a limit of memory, by the kernel's control groups."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1 = _ROOT / "memory"
_numbers = count()


class Limited:
    """A group of processes that may use so much memory together; page cache counts, too.

    Args:
        limit: bytes.

    Raises:
        SystemExit: this machine does not let us make one.
    """

    def __init__(self, limit: int) -> None:
        self._old = _V1.is_dir()
        name = f"shardwise-benchmark-{os.getpid()}-{next(_numbers)}"
        self._path = (_V1 if self._old else _ROOT) / name
        try:
            self._path.mkdir()
            name = "memory.limit_in_bytes" if self._old else "memory.max"
            (self._path / name).write_text(str(limit))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.rmdir()
            raise SystemExit(
                f"found no way to limit memory in {self._path} ({error.strerror}), expected to run "
                "as root with the memory controller of control groups"
            ) from error

    def join(self) -> None:
        """Put the calling process into the group."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak(self) -> int:
        """The most bytes that the group has used at a time, page cache included."""
        name = "memory.max_usage_in_bytes" if self._old else "memory.peak"
        return int((self._path / name).read_text())

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        for _ in range(100):
            try:
                self._path.rmdir()
            except OSError:
                time.sleep(0.05)  # the kernel still takes the last process apart
            else:
                return


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Limited]:
    """Make a group for as long as the block lasts."""
    made = Limited(limit)
    try:
        yield made
    finally:
        made.remove()
