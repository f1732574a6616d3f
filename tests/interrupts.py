"""Ctrl-C at every line of a function, one after the other.

    for attempt in at_every_line([memory.__file__]):
        with attempt:
            weights.update()
        ...  # whatever has happened, the next use works

Python raises ``KeyboardInterrupt`` between two lines, so each of them is tried: the first attempt
is interrupted before its first line, the second before its second one, and the last one completes.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any


class Attempt:
    """A block that is interrupted before its ``number``-th line.

    Args:
        files: whose lines count.
        number: of the line, from 1 on.
        skips: names of functions whose lines do not count.

    Attributes:
        where: the line at which it was interrupted; empty if it has completed.
    """

    def __init__(self, files: Sequence[str], number: int, skips: Sequence[str] = ()) -> None:
        self._files = frozenset(files)
        self._left = number
        self._skips = frozenset(skips)
        self.where = ""
        self._seen: set[tuple[FrameType, int]] = set()

    def __enter__(self) -> Attempt:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        self._seen.clear()
        return bool(self.where) and _has_interrupt(error)

    def _trace(self, frame: FrameType, event: str, value: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self._files or code.co_name in self._skips:
            return None
        if event == "line" and not self.where and not self._leaves_block(frame):
            self._left -= 1
            if not self._left:
                self.where = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                raise KeyboardInterrupt(self.where)
        return self._trace

    def _leaves_block(self, frame: FrameType) -> bool:
        """Whether this is the end of a ``with`` block, before which Python looks for no signals."""
        at = frame, frame.f_lineno
        returns = at in self._seen
        self._seen.add(at)
        return returns and linecache.getline(frame.f_code.co_filename, at[1]).strip()[:5] == "with "


def _has_interrupt(error: BaseException | None) -> bool:
    """Whether an error is the interrupt; a program must not see another one in its place."""
    return isinstance(error, KeyboardInterrupt)


def at_every_line(
    files: Sequence[str], skips: Sequence[str] = (), first: int = 1
) -> Iterator[Attempt]:
    """Yield attempts, until one completes.

    Args:
        files: whose lines count.
        skips: names of functions whose lines do not count.
        first: the number of the first line.
    """
    number = first
    while True:
        attempt = Attempt(files, number, skips)
        yield attempt
        if not attempt.where:
            return
        number += 1
