"""Full parameters that live once per host, in memory that all ranks of it see.

The full parameters of a group have addresses of their own, for life. The memory behind them is lent
from a pool of pieces that all groups have in common: unsharding opens the group's window on a
piece, through private pages, so that what a module writes to its full parameters stays with its
rank; and once it is freed, the piece waits for the next group. The window stays open: as groups
come in turns, most find the piece again that they had before, and nothing has to be mapped.

A piece is written to again only when no rank reads it any more. Every rank counts what it frees;
all free the same things in the same order, so the count at which a piece was freed tells when all
have freed it. The next gather into it waits for that; as one piece is kept to spare, it seldom has
to.

A window whose full parameters are freed is closed: their piece may hold those of another group by
then, and whoever still reads them shall not get that group's values.

Where full parameters are dropped without having been freed (a model that is deleted after an
evaluation, say), nobody takes their piece again: its memory goes back to the system when all ranks
have dropped them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.transport.arena import Arena, Window, whole_pages
from shardwise.transport.departures import Departures
from shardwise.transport.exchange import lay_out, tensors_in
from shardwise.transport.pages import PageMap

# So many free pieces are left alone, so that nobody waits for the last one freed.
_SPARE = 1
# Addresses of a piece. They cost nothing: it takes as much memory as the largest group it served.
_CAPACITY = 2**34


@dataclass(eq=False)
class Piece:
    """Memory for the full parameters of one group.

    Attributes:
        at: where in the arena it begins.
        length: how many addresses it has.
        freed: this rank's count of frees when it was freed last.
    """

    at: int
    length: int
    freed: int = 0


class Pool:
    """The pieces of all groups.

    Args:
        arena: where they lie.
        departures: to give back the memory of pieces that are dropped.
        announce: called with the number of frees so far, each time.
        wait_for_frees: returns when all ranks have freed so often.
    """

    def __init__(
        self,
        arena: Arena,
        departures: Departures,
        announce: Callable[[int], None],
        wait_for_frees: Callable[[int], None],
    ) -> None:
        self.arena = arena
        self._departures = departures
        self._announce = announce
        self._wait_for_frees = wait_for_frees
        self._free: deque[Piece] = deque()
        self._frees = 0

    def take(self, length: int, last: Piece | None) -> Piece:
        """Take a piece of at least ``length``, best ``last``. Peers may still read it."""
        fitting = [piece for piece in self._free if piece.length >= length]
        if last is not None and last in self._free:
            piece = last
        elif len(fitting) <= _SPARE:
            return self._make(max(length, _CAPACITY))
        else:
            piece = fitting[0]
        self._free.remove(piece)
        return piece

    def wait_until_free(self, piece: Piece) -> None:
        """Wait until no rank reads what was in ``piece`` before it was taken."""
        self._wait_for_frees(piece.freed)

    def _make(self, length: int) -> Piece:
        piece = Piece(self.arena.take(length), length)
        self._departures.enter(piece, piece.at, length)
        return piece

    def give_back(self, piece: Piece) -> None:
        """Note that this rank does not use a piece any more."""
        self._frees += 1
        piece.freed = self._frees
        self._free.append(piece)
        self._announce(self._frees)


class SharedBuffers:
    """The full parameters of one group; see :class:`~shardwise.transport.base.FullBuffers`.

    Attributes:
        is_fresh: whether nothing has been gathered since :meth:`allocate`: no rank reads it.
    """

    def __init__(
        self,
        pool: Pool,
        pagemap: PageMap,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._pool = pool
        self._piece: Piece | None = None
        self._last: Piece | None = None
        self.is_fresh = False
        _, end = lay_out(numels, dtypes)
        self._window = Window(whole_pages(end)) if end else None
        self._written = Window(whole_pages(end)) if end else None
        self._look = (
            pagemap.look_at(self._window.address, whole_pages(end)) if self._window else None
        )
        self.tensors = _tensors_in(self._window, numels, dtypes)
        self._for_all = _tensors_in(self._written, numels, dtypes)
        self._index = {tensor.data_ptr(): i for i, tensor in enumerate(self.tensors)}

    @property
    def at(self) -> int:
        """Where in the arena the memory is; 0 where there is none."""
        return 0 if self._piece is None else self._piece.at

    def allocate(self) -> None:
        """Give every tensor its memory. Does nothing where it has it already."""
        if self._window is not None and self._piece is None:
            self._piece = self._pool.take(self._window.length, self._last)
            if self._piece is not self._last:
                assert self._written is not None
                self._written.open_sparse(self._pool.arena.fd, self._piece.at)
                self._window.open_private(self._pool.arena.fd, self._piece.at)
                self._window.keeps = self._piece  # whose memory is there as long as views of it
            else:
                self._window.allow()
            self.is_fresh = True

    def free(self) -> None:
        """Give the memory back. Does nothing where it is already given back."""
        if self._window is not None and self._piece is not None:
            self.forget_writes()
            self._window.forbid()
            self._last, self._piece = self._piece, None
            self._pool.give_back(self._last)

    def wait_until_free(self) -> None:
        """Wait until the memory may be written to: until no peer reads what was in it before."""
        if self._piece is not None:
            self._pool.wait_until_free(self._piece)

    def for_all(self, full: torch.Tensor) -> torch.Tensor:
        """The same as ``full``, one of the tensors; what is written to it, all ranks see."""
        return self._for_all[self._index[full.data_ptr()]]

    def forget_writes(self) -> None:
        """Forget what this rank has written to the tensors themselves."""
        if self._window is not None and self._look is not None and self._look.finds_own_page():
            self._window.forget_writes()

    def abandon(self) -> None:
        """Give the memory back: every rank writes its own part itself, and this one has."""
        self.free()


def _tensors_in(
    window: Window | None, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    if window is None:
        return [torch.empty(0, dtype=dtype) for dtype in dtypes]
    return tensors_in(window, numels, dtypes)
