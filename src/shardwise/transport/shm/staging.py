"""Staging: memory through which ranks of one host read each other's tensors.

A rank copies its tensors into a buffer in its own range of the arena, posts where it begins, and
its peers read them there. Which buffer it takes is the writer's business alone, so ranks need no
agreement. A buffer is written to again once all peers have read it. No rank waits for that: until
then the rank takes another buffer. As ranks wait for each other in every collective, there are
few.

How many there are must not depend on which rank is faster, or it would be unknown how much memory a
training takes. So a rank writes to a buffer again only after a collective that all ranks began when
they had read it: peers that call the same as this rank have then read it for certain.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from shardwise.base.observe import Memory
from shardwise.transport.base import PendingWork, Work
from shardwise.transport.collective_log import LoggedCall
from shardwise.transport.memory import pack_offsets
from shardwise.transport.shm.arena import (
    Arena,
    Extents,
    Window,
    punch,
    whole_pages,
)
from shardwise.transport.shm.sync import Count, Sync

# Addresses of a buffer. They cost nothing: it takes as much memory as was ever staged in it.
_LENGTH = 2**32
# The number of buffers of each peer that stay mapped.
_MAPPED = 3


class Keeps(enum.Enum):
    """The memory that stays with buffers which no rank reads any more.

    ``ALL``: all that was ever written to.

    ``FITTING``: all, if the latest use of any buffer took at least half as much; else nothing.

    ``NOTHING``: none, until all buffers have been given back once; from then on, ``FITTING``.
    """

    ALL = "all"
    FITTING = "fitting"
    NOTHING = "nothing"


@dataclass
class Buffer:
    """Memory of this rank that its peers read.

    Attributes:
        at: where in the arena it begins.
        window: the window through which this rank writes it.
        use: the number of its last use.
        is_open: whether this rank has not yet finished that use itself.
        closed: how many collectives this rank had posted when it finished that use.
        extents: what has been written to.
        calls: those that have written to it.
    """

    at: int
    window: Window
    use: int = 0
    is_open: bool = False
    closed: int = 0
    extents: Extents = field(default_factory=Extents)
    calls: set[LoggedCall] = field(default_factory=set)


class Staging:
    """The buffers of this rank, and its windows on those of its peers.

    Args:
        arena: this rank's own range.
        sync: by which ranks tell where their tensors are staged, and which they have read.

    Attributes:
        keeps: which memory of buffers is kept once no rank reads them any more.
    """

    def __init__(self, arena: Arena, sync: Sync) -> None:
        self.rank = sync.rank
        self._arena = arena
        self._sync = sync
        self._buffers: list[Buffer] = []
        # By peer, the buffers that were read last, by where they begin.
        self._mapped: dict[int, dict[int, Window]] = {}
        self._uses = 0
        self.keeps = Keeps.ALL
        # Bytes that the latest use writes to, about: not this rank's own chunks.
        self._latest = 0
        self._open: set[int] = set()

    def stage(self, numels: list[int], dtypes: list[torch.dtype]) -> Staged:
        """Take memory for tensors that this rank's peers will read."""
        _, nbytes = pack_offsets(numels, dtypes)
        if nbytes == 0:
            return Staged(self, numels, dtypes, 0, None)
        use = self._uses + 1
        self._open.add(use)
        self._uses = use
        return Staged(self, numels, dtypes, nbytes, self._take(use, nbytes))

    def window_on(self, rank: int, number: int, nbytes: int) -> Window:
        """Map the buffer of a peer that holds the tensors of post ``number``."""
        at = self._sync.offset(number, rank)
        length = whole_pages(max(nbytes, 1))
        mapped = self._mapped.setdefault(rank, {})
        window = mapped.pop(at, None)
        if window is None or window.length < length:
            window = self._arena.window(length)
            window.open(self._arena.fd, at)
        mapped[at] = window  # as the last one
        if len(mapped) > _MAPPED:
            del mapped[next(iter(mapped))]
        return window

    def release(self, use: int, buffer: Buffer) -> None:
        """Note that this rank has finished a use. The garbage collector may call it any time."""
        buffer.is_open = False
        buffer.closed = self._sync.posted
        self._open.discard(use)
        self._sync.numbers.set(Count.DONE, min(self._open, default=self._uses + 1) - 1)

    def trim(self) -> None:
        """Give back what is not to be kept of buffers that no rank reads any more."""
        if self.keeps is Keeps.ALL:
            return
        free = [buffer for buffer in self._buffers if self._is_free(buffer)]
        for buffer in free:
            if self.keeps is Keeps.NOTHING or buffer.extents.nbytes > 2 * self._latest:
                self._give_back(buffer)
        if len(free) == len(self._buffers):
            self.keeps = Keeps.FITTING

    def _give_back(self, buffer: Buffer) -> None:
        punch(self._arena.fd, buffer.at, buffer.window.length)
        self.report("", -buffer.extents.nbytes)
        buffer.extents.clear()
        buffer.calls.clear()

    def _is_free(self, buffer: Buffer) -> bool:
        """Whether no rank reads a buffer any more, by what all ranks know."""
        peers = self._sync.others
        read_by_all = min(self._sync.numbers.get(Count.DONE, peer) for peer in peers)
        is_due = not buffer.is_open and buffer.closed < self._sync.waited
        return is_due and buffer.use <= read_by_all

    def _take(self, use: int, nbytes: int) -> Buffer:
        """Take a buffer of at least ``nbytes`` for this rank's use number ``use``."""
        self._latest = nbytes - nbytes // (len(self._sync.others) + 1)
        for buffer in self._buffers:
            if buffer.window.length >= nbytes and self._is_free(buffer):
                break
        else:
            length = max(whole_pages(nbytes), _LENGTH)
            buffer = Buffer(self._arena.take(length), self._arena.window(length))
            buffer.window.open(self._arena.fd, buffer.at)
            self._buffers.append(buffer)
        if self.keeps is not Keeps.ALL and buffer.extents.nbytes > 2 * self._latest:
            self._give_back(buffer)
        buffer.use, buffer.is_open = use, True
        return buffer

    def report(self, name: str, nbytes: int) -> None:
        """Report that ``nbytes`` more of this rank's buffers are in use."""
        self._arena.report(Memory.TRANSPORT, name, nbytes)


class Staged:
    """The tensors that ranks stage for each other in one collective.

    Attributes:
        own: this rank's tensors, to be written before it posts.
        at: where in this rank's range they begin; 0 if there are none.
    """

    def __init__(
        self,
        staging: Staging,
        numels: list[int],
        dtypes: list[torch.dtype],
        nbytes: int,
        buffer: Buffer | None,
    ) -> None:
        self._staging = staging
        self._sizes = numels, dtypes
        self._nbytes = nbytes
        self._buffer = buffer
        self.at = 0 if buffer is None else buffer.at
        self.own: list[torch.Tensor] = (
            [torch.empty(0, dtype=dtype) for dtype in dtypes]
            if buffer is None
            else buffer.window.tensors(numels, dtypes)
        )

    def of(self, rank: int, number: int) -> list[torch.Tensor]:
        """Return the tensors that ``rank`` has staged for post ``number``, which it has posted."""
        if self._buffer is None or rank == self._staging.rank:
            return self.own
        return self._staging.window_on(rank, number, self._nbytes).tensors(*self._sizes)

    def report(
        self, call: LoggedCall, written: Callable[[], Iterable[tuple[int, int, int]]]
    ) -> None:
        """Report the memory that a call uses, the first time that it uses this buffer.

        Args:
            call: the collective.
            written: returns the indices of the tensors that this rank writes to, and which elements
                of each: from the first to before the last.
        """
        buffer = self._buffer
        if buffer is None or call in buffer.calls:
            return
        buffer.calls.add(call)
        numels, dtypes = self._sizes
        offsets, _ = pack_offsets(numels, dtypes)
        grown = 0
        for i, first, last in written():
            at, size = offsets[i], dtypes[i].itemsize
            grown += buffer.extents.add(at + first * size, at + last * size)
        self._staging.report(call.name, grown)

    def until(self, finish: Callable[[], None]) -> Work:
        """Make the work that ``finish`` completes, after which this rank reads nothing staged."""
        buffer = self._buffer
        if buffer is None:
            return PendingWork(finish)

        def finish_and_release() -> None:
            finish()
            release()

        work = PendingWork(finish_and_release)
        # The buffer is released when the work is over, and also if it is dropped without a wait.
        release = weakref.finalize(work, self._staging.release, buffer.use, buffer)
        release.atexit = False
        return work
