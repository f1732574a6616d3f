"""What long work shows: a bar on a terminal, a line now and then in a log; quick work nothing."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shardwise.base.units import binary_size, printable

QUICK = 2.0  # seconds of work that show nothing
EVERY = 10.0  # seconds between lines in a log
_REDRAWN = 0.1  # and between drawings of a bar


class LongWork:
    """How far some work is; :func:`progress` shows it.

    Attributes:
        doing: what is done, for people.
        total: how much there is to do; None: that is not known.
        unit: of ``total``; ``bytes`` are shown in binary units.
    """

    def __init__(self, doing: str, total: int | None, unit: str) -> None:
        self.doing, self.total, self.unit = doing, total, unit
        self._done = 0
        self._began = time.monotonic()

    def moved(self, count: int = 1) -> None:
        """Add to what is done."""
        self._done += count

    def of(self, total: int) -> Callable[[int], None]:
        """Set how much there is to do, and return :meth:`moved`."""
        self.total = total
        return self.moved

    @property
    def share(self) -> float:
        """What is done of the whole, from 0 to 1."""
        return min(1.0, self._done / self.total) if self.total else 0.0

    def __str__(self) -> str:
        took = time.monotonic() - self._began
        if not self.total:
            return printable(f"{self.doing}, {took:.0f} s")
        left = f", {took * (1 / self.share - 1):.0f} s left" if 0 < self.share < 1 else ""
        if self.unit == "bytes":
            amounts = f"{binary_size(self._done)} of {binary_size(self.total)}"
        else:
            amounts = f"{self._done:,} of {self.total:,} {self.unit}"
        return printable(f"{self.doing}, {amounts}, {self.share:.0%}{left}")


@contextlib.contextmanager
def progress(doing: str, total: int | None = None, unit: str = "") -> Iterator[LongWork]:
    """Show on standard error how far the work inside is, if it takes more than two seconds.

    Args:
        doing: what is done, for people.
        total: how much there is to do; None: that is not known, and the seconds are shown.
        unit: of ``total``: ``chats``, or ``bytes``.
    """
    work, ended = LongWork(doing, total, unit), threading.Event()
    shows = threading.Thread(target=_show, args=(work, ended), name="progress", daemon=True)
    shows.start()
    try:
        yield work
    finally:
        ended.set()
        shows.join()


def _show(work: LongWork, ended: threading.Event) -> None:
    if ended.wait(QUICK):
        return
    from rich.console import Console  # here, and not before: it takes a moment
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        if not console.is_terminal or console.is_dumb_terminal:
            while True:
                print(work, file=sys.stderr, flush=True)
                if ended.wait(EVERY):
                    return
        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=None)
        with Bar(*columns, console=console, expand=True, transient=True) as bar:
            task = bar.add_task("", total=1.0)
            while not ended.wait(_REDRAWN):
                known = 1.0 if work.total else None
                bar.update(task, description=str(work), total=known, completed=work.share)
