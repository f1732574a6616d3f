"""The two kinds of work that transports hand out."""

from __future__ import annotations

from collections.abc import Callable


class FinishedWork:
    """A collective that was over when its call returned."""

    def wait(self) -> None:
        """Return at once."""


class PendingWork:
    """A collective that ``finish`` completes in the thread that waits.

    ``finish`` holds every tensor of the call, so that the memory lives as long as messages read
    or write it. It is let go once it has succeeded, and never called again: a work that failed
    stays failed.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._failure: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def then(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called once this has succeeded."""
        self._then = callback

    def wait(self) -> None:
        """Complete the collective, the first time.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is not None:
            try:
                self._finish()
            except BaseException as error:
                self._failure = error
                raise
            self._finish = None
            if self._then is not None:
                self._then()
