"""Giving back the memory of what all ranks have let go of.

Ranks let go of a piece of the file when Python's garbage collector does, in no common order and at
no common time. So each notes it in a table that all of them see, and who comes last gives the
memory back. A rank cannot know that of another that died, so what a dead rank had stays until all
have gone.
"""

from __future__ import annotations

import ctypes
import os
import weakref

from shardwise.transport.arena import Arena, Window, punch, whole_pages

# So many can be told apart for giving back their pages; what is beyond keeps them.
_MOST = 65536


class Departures:
    """Which rank has let go of which piece of the file.

    Args:
        arena: where the table lies; all ranks have it in the same place.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, arena: Arena, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._window = Window(whole_pages(_MOST * world_size))
        self._window.open_sparse(arena.fd, arena.take(self._window.length))
        self._left = (ctypes.c_uint8 * (_MOST * world_size)).from_address(self._window.address)
        self._count = 0
        self._process = os.getpid()
        self._fd = os.dup(arena.fd)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def enter(self, piece: object, at: int, length: int) -> None:
        """Note a piece of the file, which this rank has let go of once ``piece`` is gone.

        All ranks enter the same pieces in the same order.
        """
        number, self._count = self._count, self._count + 1
        if number < _MOST:
            weakref.finalize(piece, self._leave, number, at, length).atexit = False

    def _leave(self, number: int, at: int, length: int) -> None:
        if os.getpid() != self._process:
            return  # a child dropped its copy; its parent has not
        first = number * self._world_size
        self._left[first + self._rank] = 1
        if all(self._left[first : first + self._world_size]):
            punch(self._fd, at, length)
