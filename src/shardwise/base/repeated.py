"""A thread that does one thing again and again, until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Repeated:
    """Calls a function again and again in a thread, which does not keep the process from ending.

    Args:
        function: what it calls. What that raises ends the thread.
        pause: returns the seconds until the next call.
        name: of the thread.

    Attributes:
        error: what has ended the thread, if the function has.
    """

    def __init__(
        self, function: Callable[[], object], pause: Callable[[], float], name: str
    ) -> None:
        self._function, self._pause = function, pause
        self.error: BaseException | None = None
        self._woken, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin with a pause."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has begun and not ended."""
        return self._thread.is_alive()

    @property
    def is_closing(self) -> bool:
        """Whether no other call follows."""
        return self._closing.is_set()

    def wake(self) -> None:
        """End the pause early."""
        self._woken.set()

    def sleep(self, seconds: float) -> bool:
        """Sleep during a call; return at once, and whether, it is being closed."""
        return self._closing.wait(seconds)

    def close(self, seconds: float | None = None) -> None:
        """Let no other call follow, and wait until the one under way is over.

        Args:
            seconds: for which to wait; ``None``: as long as it takes.
        """
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None:  # Ctrl-C may have come before it was started
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            while True:
                self._woken.wait(self._pause())
                self._woken.clear()
                if self._closing.is_set():
                    return
                self._function()
        except BaseException as error:  # whatever it is, the owner must be able to learn of it
            self.error = error
