"""Parameters that live once per host: every rank's shard is a part of the full parameter.

    the file      | shard of rank 0 | shard of rank 1 | shard of rank 2 |
    rank 1 sees     .................. reads and writes                      its shard
                    reads .............................................      the full parameter

To gather is then to wait until all ranks have come so far, and to free is nothing: the full
parameter takes no memory beside the shards. It is seen through private pages. What a module writes
to its full parameter stays with the rank that wrote it, and is forgotten when it is freed.

The pages go back to the system when the last rank has let go of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from shardwise.transport.arena import Arena, Window, whole_pages
from shardwise.transport.departures import Departures
from shardwise.transport.pages import PageMap

#: Smaller full parameters than this, in bytes, would waste much of their last page.
SMALLEST = 64 * 1024


def is_worthwhile(nbytes: int) -> bool:
    """Whether a full parameter of so many bytes should be common."""
    return nbytes >= max(SMALLEST, 1)


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
        # Opening it takes memory, which a shard that is on the meta device does not need yet.
        self._open_own: Callable[[], None] | None = functools.partial(
            self._own.open, arena.fd, self.at + start
        )
        self._offset = first - start
        self.chunk_address = self._own.address + self._offset

    def chunk(self, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of this rank's chunk, 1-D."""
        if self._open_own is not None:
            self._open_own()
            self._open_own = None
        return self._own.tensor(self._offset, numel, self._dtype)

    def keep_values(self) -> None:
        """Have ``full`` keep its values: what is written to becomes this rank's own."""
        self._seen.touch()

    def release(self) -> None:
        """Forget what was written to the full parameter."""
        if self._look.finds_own_page():
            self._seen.forget_writes()
