"""Full parameters that live once per host, in memory that all ranks of it see.

The full parameters of a group have addresses of their own, for life. The memory behind them is lent
from a pool of pieces that all groups have in common: unsharding opens the group's window on a
piece, through private pages, so that what a module writes to its full parameters stays with its
rank; and once it is freed, the piece waits for the next group. The window stays open: as groups
come in turns, most find the piece again that they had before, and nothing has to be mapped.

A piece is written to again only when no rank reads it any more, and all ranks have to choose the
same one. What a rank has freed, its peers learn late, and ranks need not free in the same order
(one of them may reshard by itself, to save its shards, say). So ranks choose by what all of them
know: a rank notes before which of its collectives it freed a piece, and what all have freed before
one gather is free for the next. So a gather begins when all ranks have begun the one before.

    collective    7          8          9
    rank 0    ... gather     gather     gather into A: both freed it before 8
    rank 1    ... gather     gather     gather into A
              free A         (rank 0 frees B)

A window whose full parameters are freed is closed: their piece may hold those of another group by
then, and whoever still reads them shall not get that group's values.

Where full parameters are dropped without having been freed (a model that is deleted after an
evaluation, say), nobody takes their piece again: its memory goes back to the system when all ranks
have dropped them.

Giving back the memory of what all ranks have let go of.

Ranks let go of a piece of the file when Python's garbage collector does, in no common order and at
no common time. So each notes it in a table that all of them see, and who comes last gives the
memory back. A rank cannot know that of another that died, so what a dead rank had stays until all
have gone.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.transport.collective_log import Call
from shardwise.transport.shm.arena import Arena, PageMap, Window, punch, whole_pages
from shardwise.transport.shm.staging import lay_out, tensors_in
from shardwise.transport.shm.sync import Posts

# Addresses of a piece. They cost nothing: it takes as much memory as the largest group it served.
_CAPACITY = 2**34
# So many pieces can be told apart for being used again.
_MOST = 65536


@dataclass(eq=False)
class Piece:
    """Memory for the full parameters of one group.

    Attributes:
        number: in the order in which all ranks make pieces.
        at: where in the arena it begins.
        length: how many addresses it has.
        taken: how many collectives had been posted when it was taken last.
    """

    number: int
    at: int
    length: int
    taken: int = 0


class Pool:
    """The pieces of all groups.

    Args:
        arena: where they lie.
        departures: to give back the memory of pieces that are dropped.
        posts: of this rank's collectives.

    Attributes:
        arena: the same.
    """

    def __init__(self, arena: Arena, departures: Departures, posts: Posts) -> None:
        self.arena = arena
        self._last_gather = 0
        self._departures = departures
        self._posts = posts
        self._ranks = len(posts.peers) + 1
        self._window = Window(whole_pages(8 * _MOST * self._ranks))
        self._window.open_sparse(arena.fd, arena.take(self._window.length))
        # For every piece and rank: before which collective the rank freed it last.
        table = ctypes.c_uint64 * (_MOST * self._ranks)
        self._freed_before = table.from_address(self._window.address)
        self._made = 0
        self._freed: list[Piece] = []

    def wait_for_last_gather(self, call: Call) -> None:
        """Wait until what peers have freed before the last gather is known, for ``call``."""
        self._posts.wait_until(self._last_gather, call)

    def note_gather(self, number: int) -> None:
        """Note that a gather into pieces was posted."""
        self._last_gather = number

    def take(self, length: int, last: Piece | None) -> Piece:
        """Take a piece of at least ``length`` that no rank uses; ``last`` if it can be had.

        All ranks take the same one, after :meth:`wait_for_last_gather` of the same collective.
        """
        fitting = [each for each in self._freed if each.length >= length and self._is_free(each)]
        if last is not None and last in fitting:
            piece = last
        elif fitting:
            piece = min(fitting, key=lambda each: each.at)
        else:
            piece = self._make(max(length, _CAPACITY))
        if fitting:
            self._freed.remove(piece)
        piece.taken = self._posts.posted
        return piece

    def give_back(self, piece: Piece) -> None:
        """Note that this rank does not use a piece any more."""
        if piece.number < _MOST:
            at = piece.number * self._ranks + self._posts.rank
            self._freed_before[at] = self._posts.posted + 1
            self._freed.append(piece)

    def _is_free(self, piece: Piece) -> bool:
        """Whether all ranks had freed ``piece`` before the last gather.

        A peer that frees it just now writes a later collective: to all ranks it is in use still.
        """
        first = piece.number * self._ranks
        return all(
            piece.taken < before <= self._last_gather
            for before in self._freed_before[first : first + self._ranks]
        )

    def _make(self, length: int) -> Piece:
        piece = Piece(self._made, self.arena.take(length), length)
        self._made += 1
        self._departures.enter(piece, piece.at, length)
        return piece


class SharedBuffers:
    """The full parameters of one group; see :class:`~shardwise.transport.base.FullBuffers`.

    Attributes:
        is_fresh: whether nothing has been gathered since :meth:`take`: no rank reads it.
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
        """Let the next gather give every tensor its memory. Does nothing where it has it already.

        Which memory, ranks agree on in the gather.
        """

    def take(self) -> None:
        """Take memory that no rank reads, unless it is there; then the tensors are there to use."""
        if self._window is None or self._piece is not None:
            return
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

    def for_all(self, full: torch.Tensor) -> torch.Tensor:
        """The same as ``full``, one of the tensors; what is written to it, all ranks see."""
        return self._for_all[self._index[full.data_ptr()]]

    def forget_writes(self) -> None:
        """Forget what this rank has written to the tensors themselves."""
        if self._window is not None and self._look is not None and self._look.finds_own_page():
            self._window.forget_writes()

    def abandon(self) -> None:
        """Let go of the memory for good: peers may not have chosen it yet for the same gather."""
        if self._window is not None and self._piece is not None:
            self.forget_writes()
            self._window.forbid()
            self._last = self._piece = None


def _tensors_in(
    window: Window | None, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    if window is None:
        return [torch.empty(0, dtype=dtype) for dtype in dtypes]
    return tensors_in(window, numels, dtypes)


# So many can be told apart for giving back their pages; what is beyond keeps them.


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
