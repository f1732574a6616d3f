"""Numbers by which ranks that share memory tell each other how far they have come.

Every rank has a line of its own, which only it writes to:

    posted    collectives of which it has done its part
    done      collectives whose exchange memory it reads no more
    pulse     changes whenever one of them does; others sleep on it
    marks     what the last collectives were, to see that all ranks call the same
    places    where the rank laid out what peers read in them
"""

from __future__ import annotations

import ctypes
import enum

from shardwise.transport import futex
from shardwise.transport.arena import Arena, Window, whole_pages

#: Collectives that may be under way at once.
MARKS = 4096
_LINE = 64
_PULSE_AT = 2 * _LINE
_MARKS_AT = 3 * _LINE
_PLACES_AT = _MARKS_AT + 4 * MARKS
_STRIDE = _PLACES_AT + 8 * MARKS


class Count(enum.IntEnum):
    """What is counted; a cache line each."""

    POSTED = 0
    DONE = 1


class Signals:
    """The lines of all ranks.

    Args:
        arena: where they lie.
        rank: whose line this process writes.
        world_size: number of lines.
    """

    def __init__(self, arena: Arena, rank: int, world_size: int) -> None:
        nbytes = whole_pages(_STRIDE * world_size)
        self._window = Window(nbytes)
        self._window.open(arena.fd, arena.take(nbytes))
        base = self._window.address
        number, small = ctypes.c_uint64.from_address, ctypes.c_uint32.from_address
        lines = [base + _STRIDE * each for each in range(world_size)]
        self._counts = [[number(line + _LINE * count) for count in Count] for line in lines]
        self._pulses = [small(line + _PULSE_AT) for line in lines]
        self._pulse_at = [line + _PULSE_AT for line in lines]
        self._marks = [(ctypes.c_uint32 * MARKS).from_address(line + _MARKS_AT) for line in lines]
        self._places = [(ctypes.c_uint64 * MARKS).from_address(line + _PLACES_AT) for line in lines]
        self._rank = rank

    def get(self, count: Count, rank: int) -> int:
        """How far ``rank`` has come."""
        return self._counts[rank][count].value

    def set(self, count: Count, value: int) -> None:
        """Tell how far this rank has come. What it wrote before is seen by who sees this."""
        self._counts[self._rank][count].value = value
        pulse = self._pulses[self._rank]
        pulse.value = (pulse.value + 1) & 0xFFFFFFFF
        futex.wake(self._pulse_at[self._rank])

    def describe(self, number: int, mark: int, place: int) -> None:
        """Note what collective ``number`` is and where its tensors lie, before it is posted."""
        self._marks[self._rank][number % MARKS] = mark
        self._places[self._rank][number % MARKS] = place

    def place(self, number: int, rank: int) -> int:
        """Where the tensors of collective ``number`` lie that ``rank`` has laid out."""
        return self._places[rank][number % MARKS]

    def mark(self, number: int, rank: int) -> int:
        """What collective ``number`` is to ``rank``, which has posted it not long ago."""
        return self._marks[rank][number % MARKS]

    def sleep(self, count: Count, rank: int, value: int, seconds: float) -> bool:
        """Sleep until ``rank`` has come as far as ``value``, at most about ``seconds``.

        Returns:
            Whether it has.
        """
        pulse = self._pulses[rank].value
        if self.get(count, rank) >= value:
            return True
        futex.wait(self._pulse_at[rank], pulse, seconds)
        return self.get(count, rank) >= value
