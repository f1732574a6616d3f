"""Parameters that live once per host: every rank's shard is a part of the full parameter.

    the file      | shard of rank 0 | shard of rank 1 | shard of rank 2 |
    rank 1 sees     .................. reads and writes                      its shard
                    reads .............................................      the full parameter

To gather is then to wait until all ranks have come so far, and to free is nothing: the full
parameter takes no memory beside the shards. It is seen through private pages. What a module writes
to its full parameter stays with the rank that wrote it, and is forgotten when it is freed.

The pages go back to the system when the last rank has let go of them. A rank cannot know that of
another that died, so what a dead rank had stays until all have gone.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

from shardwise.transport.arena import Arena, Window, punch, whole_pages
from shardwise.transport.pages import PageMap

#: Smaller full parameters than this, in bytes, would waste much of their last page.
SMALLEST = 64 * 1024
# So many can be told apart for giving back their pages; what is beyond keeps them.
_MOST = 65536


def is_worthwhile(nbytes: int) -> bool:
    """Whether a full parameter of so many bytes should be common."""
    return nbytes >= max(SMALLEST, 1)


class Departures:
    """Which rank has let go of which piece of the file.

    Args:
        arena: where the table lies; all ranks have it in the same place.
        rank: of this process.
        world_size: number of ranks.

    Attributes:
        count: how many pieces there have been.
    """

    def __init__(self, arena: Arena, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._window = Window(whole_pages(_MOST * world_size))
        self._window.open_sparse(arena.fd, arena.take(self._window.length))
        self._left = (ctypes.c_uint8 * (_MOST * world_size)).from_address(self._window.address)
        self.count = 0
        self._fd = os.dup(arena.fd)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def enter(self, piece: object, at: int, length: int) -> None:
        """Note a piece of the file, which this rank has let go of once ``piece`` is gone."""
        number, self.count = self.count, self.count + 1
        if number < _MOST:
            weakref.finalize(piece, self._leave, number, at, length).atexit = False

    def _leave(self, number: int, at: int, length: int) -> None:
        first = number * self._world_size
        self._left[first + self._rank] = 1
        if all(self._left[first : first + self._world_size]):
            punch(self._fd, at, length)


class _Piece:
    """Lives as long as anything shows a piece of the file."""


class SharedFull:
    """A full parameter of which this rank's chunk is writable: see ``base.CommonFull``.

    Args:
        arena: where it lies; all ranks take the same pieces in the same order.
        departures: to give its pages back.
        pagemap: of this process.
        rank: of this process.
        world_size: number of chunks.
        chunk_numel: elements of a chunk.
        dtype: of the elements.

    Attributes:
        at: where in the file it begins.
        full: 1-D, all chunks.
        chunk_address: where this rank's chunk is.
    """

    def __init__(
        self,
        arena: Arena,
        departures: Departures,
        pagemap: PageMap,
        rank: int,
        world_size: int,
        chunk_numel: int,
        dtype: torch.dtype,
    ) -> None:
        nbytes = chunk_numel * dtype.itemsize
        length = whole_pages(world_size * nbytes)
        self.at = arena.take(length)
        piece = _Piece()
        departures.enter(piece, self.at, length)
        self._dtype = dtype
        seen = Window(length, keeps=piece)
        seen.open_private(arena.fd, self.at)
        self.full = seen.tensor(0, world_size * chunk_numel, dtype)
        self._seen = seen
        self._look = pagemap.look_at(seen.address, length)
        # The chunk begins and ends within pages that neighbours write to as well.
        first = rank * nbytes
        start = whole_pages(first + 1) - whole_pages(1)
        self._own = Window(whole_pages(first + nbytes) - start, keeps=piece)
        self._own.open(arena.fd, self.at + start)
        self._offset = first - start
        self.chunk_address = self._own.address + self._offset

    def chunk(self, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of this rank's chunk, 1-D."""
        return self._own.tensor(self._offset, numel, self._dtype)

    def release(self) -> None:
        """Forget what was written to the full parameter."""
        if self._look.finds_own_page():
            self._seen.forget_writes()
