"""A clock that stands still while this process is suspended.

Whoever waits for others must not count the time for which it was suspended itself: they may have
sent what it has not read yet, and may have been suspended with it.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

_MOST = 0.5  # seconds between two looks at the clock; in more, the process was suspended
_TICK = 0.1
_WAIT = 0.25  # seconds of one wait of several; less than _MOST
_KEPT = 64  # suspensions


class Clock:
    """Seconds for which this process has run, as far as somebody looks often enough.

    Args:
        read: a clock that does not stand still, in seconds.
    """

    def __init__(self, read: Callable[[], float] = lambda: time.monotonic()) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last, self._now = read(), 0.0
        self._suspensions: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # the end, and how long

    def now(self) -> float:
        """Return the time in seconds."""
        with self._lock:
            last, self._last = self._last, self._read()
            passed = self._last - last
            self._now += min(passed, _MOST)
            if passed > _MOST:
                self._suspensions.append((self._now, passed))
            return self._now

    def was_suspended(self, since: float, seconds: float) -> bool:
        """Whether this process was suspended for more than so many seconds since then."""
        self.now()
        return any(end > since and passed > seconds for end, passed in [*self._suspensions])

    def waits(self, seconds: float) -> Iterator[float]:
        """Yield the seconds for one short wait after another.

        Raises:
            TimeoutError: they have taken so many seconds together.
        """
        end = self.now() + seconds
        while (left := end - self.now()) > 0:
            yield max(0.001, min(left, _WAIT))
        raise TimeoutError


class Timers:
    """How long this host has seen what it sees, by a clock of its own.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, tuple[object, float]] = {}

    def elapsed(self, name: str, seen: object) -> float:
        """Return for how many seconds the value of this name has been the same."""
        now = self._clock()
        last = self._since.get(name)
        if last is None or last[0] != seen:
            self._since[name] = last = (seen, now)
        return now - last[1]


@functools.cache
def process_clock() -> Clock:
    """Return a clock of this process, at which a thread looks."""
    clock = Clock()

    def tick() -> None:
        while True:
            time.sleep(_TICK)
            clock.now()

    threading.Thread(target=tick, name="shardwise clock", daemon=True).start()
    os.register_at_fork(after_in_child=process_clock.cache_clear)  # this thread is not in a child
    return clock
