"""Signals that ask a process to stop, in a block that has to be undone or completed first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], None]]:
    """Let the first SIGINT or SIGTERM wait until the block has ended; the second does not wait.

    Signals arrive in the main thread; in another one, nothing is different inside.

    Yields:
        A function that raises ``RuntimeError`` if one waits, so that the block can be given up.
    """
    waiting: list[tuple[int, Any]] = []
    before: dict[int, Any] = {}

    def note(signum: int, frame: Any) -> None:
        if waiting:
            before[signum](signum, frame)
        waiting.append((signum, frame))

    def check() -> None:
        if waiting:
            raise RuntimeError(f"interrupted by {signal.Signals(waiting[0][0]).name}")

    try:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if callable(handler := signal.getsignal(signum)):
                    before[signum] = handler
                    signal.signal(signum, note)
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            before[waiting[0][0]](*waiting[0])
