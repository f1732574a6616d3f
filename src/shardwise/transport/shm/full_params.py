"""Full parameters that exist once per host, in memory that all its ranks see.

The full parameters of a group have addresses of their own, for life. The memory behind them comes
from a pool of pieces that serves all groups. Unsharding opens the group's window on a piece,
through private pages, so that what a module writes to its full parameters stays with its rank.
Once freed, the piece is there for the next group. As groups take turns, most get the piece again
that they had before, and nothing has to be mapped.

A piece may be written to again only when no rank reads it any more, and all ranks have to choose
the same one. But a rank learns late what its peers have freed, and ranks need not free in the same
order (one of them may reshard by itself, to save its shards, say). So ranks choose by what all of
them know. Each rank notes before which of its collectives it freed a piece, and what all ranks had
freed before one gather is free for the next. So a gather begins when all ranks have begun the one
before.

    collective    7          8          9
    rank 0    ... gather     gather     gather into A: both freed it before 8
    rank 1    ... gather     gather     gather into A
              free A         (rank 0 frees B)

A window whose full parameters are freed is closed. By then their piece may hold those of another
group, and ranks that still read them must not get that group's values.

If full parameters are dropped without having been freed (a model is deleted after an evaluation,
say), none takes their piece again. Its memory goes back to the system when all ranks have dropped
them, which :class:`ReferenceCounts` finds out.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise._torch import dtensor
from shardwise.base.observe import Memory
from shardwise.transport.collective_log import LoggedCall
from shardwise.transport.memory import pack_offsets
from shardwise.transport.shm.arena import (
    Arena,
    Extents,
    PageMap,
    PrivatePages,
    Window,
    punch,
    whole_pages,
)
from shardwise.transport.shm.sync import Sync

# Addresses of a piece. They cost nothing: it takes as much memory as the largest group it served.
_LENGTH = 2**34
# Pieces that have entries in the tables that ranks share. Further ones are never used again.
_PIECES = 65536
# Groups of fewer bytes share pieces, whatever their sizes.
_SMALL = 1024 * 1024


class SharedBuffers:
    """The full parameters of one group; see :class:`~shardwise.transport.base.FullBuffers`.

    Args:
        pool: where their memory comes from.
        pagemap: to find out what this rank has written to them; ``None``: nothing, ever.
        numels: the number of elements of each tensor.
        dtypes: the dtype of each tensor.

    Attributes:
        tensors: the tensors, through private pages.
        is_fresh: whether nothing has been gathered since :meth:`take`, so that no rank reads them.
        nbytes: 0: the pool reports its memory.
    """

    nbytes = 0

    def __init__(
        self,
        pool: Pool,
        pagemap: PageMap | None,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._pool = pool
        self._piece: PoolPiece | None = None
        self._last: PoolPiece | None = None
        self.is_fresh = False
        _, end = pack_offsets(numels, dtypes)
        self._end, length = end, whole_pages(max(end, 1))
        self._window, self._written = pool.arena.window(length), pool.arena.window(length)
        self._private = PrivatePages(pagemap, self._window.address, length) if pagemap else None
        self.tensors = self._window.tensors(numels, dtypes)
        self._for_all = self._written.tensors(numels, dtypes)
        self._index = {dtensor.place_of(tensor): i for i, tensor in enumerate(self.tensors)}

    @property
    def at(self) -> int:
        """Where in the arena the memory is; 0 if there is none."""
        return 0 if self._piece is None else self._piece.at

    def allocate(self) -> None:
        """Do nothing: the ranks agree in the next gather on the memory that each tensor gets."""

    def take(self, call: LoggedCall) -> None:
        """Take memory that no rank reads, unless there is memory; then the tensors may be used.

        All ranks call this for the same gather, ``call``, and get the same memory.
        """
        if not self._end or self._piece is not None:
            return
        self._piece = self._pool.take(self._window.length, (call.name, self._end))
        if self._piece is not self._last:
            self._written.open(self._pool.arena.fd, self._piece.at)
            self._window.open_private(self._pool.arena.fd, self._piece.at)
            self._window.keeps = self._piece  # its memory lives as long as views of it
        else:
            self._window.allow()
        self._pool.report(self._piece, self._end, call)
        self.is_fresh = True

    def free(self) -> None:
        """Release the memory. Does nothing if it is already released."""
        piece = self._close()
        if piece is not None:
            self._last = piece
            self._pool.give_back(piece)

    def retain(self) -> None:
        """Release the memory. The addresses are these tensors' own, for life."""
        self.free()

    def abandon(self) -> None:
        """Release the memory for good: peers may not have chosen it yet for the same gather."""
        if self._close() is not None:
            self._last = None

    def for_all(self, place: tuple[int, int]) -> torch.Tensor:
        """Return the twin of the tensor at ``place``, through which all ranks see writes."""
        return self._for_all[self._index[place]]

    def forget_writes(self) -> None:
        """Forget what this rank has written to the tensors themselves."""
        if self._private is not None and self._private.exist():
            self._window.forget_writes()

    def _close(self) -> PoolPiece | None:
        """Close the window; return the piece that it showed, if it was open."""
        if self._piece is None:
            return None
        self.forget_writes()
        self._window.forbid()
        piece, self._piece = self._piece, None
        return piece


@dataclass(eq=False)
class PoolPiece:
    """Memory for the full parameters of one group.

    Attributes:
        number: its number, in the order in which all ranks make pieces.
        at: where in the arena it begins.
        length: how many bytes of addresses it has.
        taken: the number of collectives that had been posted when it was taken last.
        extents: what has been in use.
    """

    number: int
    at: int
    length: int
    taken: int = 0
    extents: Extents = field(default_factory=Extents)

    def suits(self, nbytes: int) -> bool:
        """Whether this piece is not kept for larger groups.

        A piece keeps the memory of the largest group that it served. If a group of half that size
        used it, a large group that comes next would let another piece grow as large.
        """
        return self.extents.nbytes <= 2 * max(nbytes, _SMALL)

    def cost(self, nbytes: int) -> tuple[int, int, int]:
        """Return what speaks against using this piece for ``nbytes``; the lowest is taken.

        It should grow by little, and a large one should stay for a large group. Ranks use pieces
        alike, so all get the same.
        """
        return max(0, nbytes - self.extents.nbytes), self.extents.nbytes, self.at


class Pool:
    """The pieces of all groups.

    Args:
        arena: the range of shared memory that they lie in.
        references: to give back the memory of pieces that are dropped.
        sync: the posts of this rank's collectives.

    Attributes:
        arena: as passed.
        last_gather: the number of the last gather into pieces that this rank has posted. Once all
            ranks have, it is known what they freed before.
    """

    def __init__(self, arena: Arena, references: ReferenceCounts, sync: Sync) -> None:
        self.arena = arena
        self.last_gather = 0
        self._latest = 0  # bytes of the piece that was taken last
        self._references = references
        self._sync = sync
        self._ranks = len(sync.others) + 1
        self._window = Window(whole_pages(8 * _PIECES * self._ranks))
        self._window.open(arena.fd, arena.take(self._window.length))
        # For every piece and rank: before which collective the rank freed it last.
        table = ctypes.c_uint64 * (_PIECES * self._ranks)
        self._freed_before = table.from_address(self._window.address)
        self._made = 0
        self._freed: list[PoolPiece] = []
        # What this rank uses. Pieces that are dropped with their windows are never given back.
        self._taken: weakref.WeakSet[PoolPiece] = weakref.WeakSet()
        # What groups had last. Not what this rank's own had: it may only have supplied them.
        self._last: weakref.WeakValueDictionary[tuple[str, int], PoolPiece] = (
            weakref.WeakValueDictionary()
        )

    def take(self, length: int, of: tuple[str, int]) -> PoolPiece:
        """Take a piece of at least ``length`` that no rank uses; the last one if possible.

        All ranks take the same one, once all have posted the last gather.

        Args:
            length: in bytes.
            of: the name of the group, and the bytes that it needs.
        """

        def fits(each: PoolPiece) -> bool:
            return each.length >= length and each.suits(length) and self._is_free(each)

        piece = self._last.get(of)
        if piece is None or piece not in self._freed or not fits(piece):
            fitting = filter(fits, self._freed)
            piece = min(fitting, key=lambda each: each.cost(length), default=None)
        if piece is None:
            piece = self._make(max(length, _LENGTH))
        else:
            self._freed.remove(piece)
        piece.taken = self._sync.posted
        self._taken.add(piece)
        self._last[of] = piece
        self._latest = length
        return piece

    def trim(self) -> None:
        """Give back the memory of pieces that are kept for larger groups than are gathered now.

        Only the first rank does anything. Ranks go on to choose pieces as if nothing had happened,
        so the next large group gets the same one. What happens in between is safe: no rank takes a
        piece before every rank has posted a gather since it was freed, and here this rank has not.
        """
        for piece in self._freed if self._sync.rank == 0 else ():
            freed = self._freed_by(piece)
            is_known = piece.taken < min(freed) and max(freed) <= self._sync.waited
            if is_known and max(freed) > self.last_gather and not piece.suits(self._latest):
                punch(self.arena.fd, piece.at, piece.length)

    def trim_beside(self) -> None:
        """Give back the memory of pieces that wait for groups while a much larger one is there.

        Call this between :meth:`take` and the post of the same gather. Only the first rank does
        anything, as in :meth:`trim`. It is safe, too: no rank takes one of these pieces in this
        gather, and none begins the next one before this rank has posted this one.

        A piece that this gather has taken does not count: groups that follow it may need the others
        at once. It counts if it is still there at the next gather, as the head of a model is when
        backward begins.
        """
        if self._sync.rank != 0:
            return
        stay = [each.extents.nbytes for each in self._taken if each.taken < self._sync.posted]
        largest = max(stay, default=0)
        for piece in self._freed:
            if 2 * piece.extents.nbytes < largest and self._is_free(piece):
                punch(self.arena.fd, piece.at, piece.length)

    def give_back(self, piece: PoolPiece) -> None:
        """Note that this rank does not use a piece any more."""
        self._taken.discard(piece)
        if piece.number < _PIECES:
            first = piece.number * self._ranks
            for rank in self._sync.numbers.written:
                self._freed_before[first + rank] = self._sync.posted + 1
            self._freed.append(piece)

    def report(self, piece: PoolPiece, end: int, call: LoggedCall) -> None:
        """Report that a call uses the first ``end`` bytes of a piece.

        Its memory is there once for all ranks, so this rank reports its share.
        """
        before = piece.extents.nbytes
        if piece.extents.add(0, end):
            self._references.report(call.name, before, piece.extents.nbytes)

    def _is_free(self, piece: PoolPiece) -> bool:
        """Whether all ranks had freed ``piece`` before the last gather.

        A peer that frees it at this moment writes a later collective: for all ranks it is still in
        use.
        """
        freed = self._freed_by(piece)
        return piece.taken < min(freed) and max(freed) <= self.last_gather

    def _freed_by(self, piece: PoolPiece) -> list[int]:
        """Before which collective each rank freed a piece last."""
        first = piece.number * self._ranks
        return list(self._freed_before[first : first + self._ranks])

    def _make(self, length: int) -> PoolPiece:
        piece = PoolPiece(self._made, self.arena.take(length), length)
        self._made += 1
        self._references.add(piece)
        return piece


class ReferenceCounts:
    """Which ranks still hold which piece of the file, to give back what no rank holds any more.

    Ranks drop a piece when Python's garbage collector does, in no common order and at no common
    time. So each notes it in a table that all of them see, and the last one gives the memory back.
    What a rank held that died stays until all ranks are gone.

    Args:
        arena: the range of shared memory for the table, the same on all ranks.
        rank: this process's rank.
        world_size: the number of ranks.
    """

    def __init__(self, arena: Arena, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._window = Window(whole_pages(_PIECES * world_size))
        self._window.open(arena.fd, arena.take(self._window.length))
        table = ctypes.c_uint8 * (_PIECES * world_size)
        self._dropped = table.from_address(self._window.address)
        self._process = os.getpid()
        self._arena = arena
        self._fd = os.dup(arena.fd)
        weakref.finalize(self, os.close, self._fd).atexit = False

    def add(self, piece: PoolPiece) -> None:
        """Add a piece of the file, which this rank holds as long as the object lives."""
        place = piece.number, piece.at, piece.length, piece.extents
        weakref.finalize(piece, self._drop, *place).atexit = False

    def report(self, name: str, before: int, now: int) -> None:
        """Report this rank's share of a change of bytes; those of all ranks add up to it."""
        first, last = (
            [rank * nbytes // self._world_size for nbytes in (before, now)]
            for rank in (self._rank, self._rank + 1)
        )
        self._arena.report(Memory.FULL_PARAMETERS, name, last[1] - first[1] - (last[0] - first[0]))

    def _drop(self, number: int, at: int, length: int, extents: Extents) -> None:
        if os.getpid() != self._process:
            return  # a child dropped its copy; its parent has not
        self.report("", extents.nbytes, 0)
        if number >= _PIECES:
            return
        first = number * self._world_size
        self._dropped[first + self._rank] = 1
        if all(self._dropped[first : first + self._world_size]):
            punch(self._fd, at, length)
