"""Memory through which ranks of one host hand each other tensors that do not live in common memory.

A rank lays its tensors out in a part of its own range of the arena, tells where, and its peers
read them there. Where a part lies is the writer's business alone, so ranks need not agree on it. A
part is written to again when all peers have read it; nobody waits for that, as another one is
taken until then. Ranks wait for each other in every collective, so there are few.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.transport.base import PendingWork, Work
from shardwise.transport.shm.arena import Arena, Window, whole_pages
from shardwise.transport.shm.sync import Count, Posts

_ALIGNMENT = 64
# Addresses of a part. They cost nothing: it takes as much memory as was ever laid out in it.
_ROOM = 2**32
# Of each peer so many parts stay mapped.
_SEEN = 3


@dataclass
class Part:
    """A piece of memory of this rank.

    Attributes:
        at: where in the arena it begins.
        window: through which it is seen here.
        use: the number of its last use.
        is_open: whether this rank has not yet finished that use itself.
    """

    at: int
    window: Window
    use: int = 0
    is_open: bool = False


def lay_out(numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Where tensors lie that follow each other, in bytes, and where the last one ends."""
    offsets, end = [], 0
    for numel, dtype in zip(numels, dtypes, strict=True):
        offsets.append(end)
        end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def tensors_in(
    window: Window, numels: Sequence[int], dtypes: Sequence[torch.dtype]
) -> list[torch.Tensor]:
    """The tensors of a layout, as a window shows them."""
    offsets, _ = lay_out(numels, dtypes)
    return [
        window.tensor(offset, numel, dtype)
        for offset, numel, dtype in zip(offsets, numels, dtypes, strict=True)
    ]


class Exchange:
    """The parts of this rank, and what it sees of its peers'.

    Args:
        arena: this rank's own range.
        posts: by which ranks tell where their parts lie, and which they are done with.
    """

    def __init__(self, arena: Arena, posts: Posts) -> None:
        self.rank = posts.rank
        self._arena = arena
        self._posts = posts
        self._parts: list[Part] = []
        # Of each peer the parts that were read last, by where they begin.
        self._seen: dict[int, dict[int, Window]] = {}
        self._uses = 0
        self._open: set[int] = set()

    def lay_out(self, numels: list[int], dtypes: list[torch.dtype]) -> LaidOut:
        """Take memory in which this rank lays out tensors for its peers."""
        _, nbytes = lay_out(numels, dtypes)
        if nbytes == 0:
            return LaidOut(self, numels, dtypes, 0, None)
        use = self._uses + 1
        self._open.add(use)
        self._uses = use
        return LaidOut(self, numels, dtypes, nbytes, self._part(use, nbytes))

    def see(self, rank: int, number: int, nbytes: int) -> Window:
        """The part of a peer that holds the tensors of post ``number``."""
        at = self._posts.place(number, rank)
        length = whole_pages(max(nbytes, 1))
        seen = self._seen.setdefault(rank, {})
        window = seen.pop(at, None)
        if window is None or window.length < length:
            window = Window(length)
            window.open_sparse(self._arena.fd, at)
        seen[at] = window  # as the last one
        if len(seen) > _SEEN:
            del seen[next(iter(seen))]
        return window

    def finish(self, use: int, part: Part) -> None:
        """Note that this rank reads no more of a use; a garbage collector may call it any time."""
        part.is_open = False
        self._open.discard(use)
        self._posts.signals.set(Count.DONE, min(self._open, default=self._uses + 1) - 1)

    def _part(self, use: int, nbytes: int) -> Part:
        """Take a part of at least ``nbytes`` for this rank's use number ``use``."""
        signals = self._posts.signals
        read_by_all = min(signals.get(Count.DONE, peer) for peer in self._posts.peers)
        for part in self._parts:
            if part.use <= read_by_all and not part.is_open and part.window.length >= nbytes:
                break
        else:
            part = self._make(max(whole_pages(nbytes), _ROOM))
            self._parts.append(part)
        part.use, part.is_open = use, True
        return part

    def _make(self, length: int) -> Part:
        window = Window(length)
        made = Part(self._arena.take(length), window)
        window.open_sparse(self._arena.fd, made.at)
        return made


class LaidOut:
    """What the ranks lay out for each other in one collective.

    Attributes:
        own: what this rank lays out, to be written to before it posts.
        at: where in this rank's range that lies; 0 where there is nothing.
    """

    def __init__(
        self,
        exchange: Exchange,
        numels: list[int],
        dtypes: list[torch.dtype],
        nbytes: int,
        part: Part | None,
    ) -> None:
        self._exchange = exchange
        self._sizes = numels, dtypes
        self._nbytes = nbytes
        self._part = part
        self.at = 0 if part is None else part.at
        self.own: list[torch.Tensor] = (
            [torch.empty(0, dtype=dtype) for dtype in dtypes]
            if part is None
            else tensors_in(part.window, numels, dtypes)
        )

    def of(self, rank: int, number: int) -> list[torch.Tensor]:
        """What ``rank`` has laid out in collective ``number``, which it has posted."""
        if self._part is None or rank == self._exchange.rank:
            return self.own
        window = self._exchange.see(rank, number, self._nbytes)
        return tensors_in(window, *self._sizes)

    def until(self, finish: Callable[[], None]) -> Work:
        """Make the work that ``finish`` completes; when it is over, all this has been read here."""
        part = self._part
        if part is None:
            return PendingWork(finish)

        def finish_and_release() -> None:
            finish()
            release()

        work = PendingWork(finish_and_release)
        # The part is released when the work is over, and also when it is dropped without a wait.
        release = weakref.finalize(work, self._exchange.finish, part.use, part)
        release.atexit = False
        return work
