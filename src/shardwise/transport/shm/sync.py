"""Numbers by which ranks that share memory tell each other how far they have come.

Every rank has a line of its own, which only it writes to:

    posted    collectives of which it has done its part
    done      collectives whose exchange memory it reads no more
    pulse     changes whenever one of them does; others sleep on it
    marks     what the last collectives were, to see that all ranks call the same
    places    where the rank laid out what peers read in them

What ranks that share memory tell each other of their collectives, and waiting for it.

A rank that has done its part of a collective *posts* it: under the next number, with a mark that
says what it called and where its tensors lie. Who needs what a peer did waits for that number, and
compares marks. Ranks that wait sleep, and look up now and then for peers that are gone.
"""

from __future__ import annotations

import ctypes
import enum
import time
import weakref

import torch.distributed as dist

from shardwise._torch import c10d
from shardwise.errors import RanksDivergedError
from shardwise.transport.collective_log import Call, CollectiveLog
from shardwise.transport.peers import peer_lost
from shardwise.transport.shm import futex
from shardwise.transport.shm.arena import Arena, Window, whole_pages
from shardwise.transport.shm.handshake import Meeting

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


_LOOK_SECONDS = 0.1
_COMPARE_SECONDS = 3.0


class Posts:
    """The posts of the ranks of one process group.

    Args:
        group: the process group, which this does not keep alive.
        meeting: of its ranks; closed when this is gone.
        signals: their lines.
        log: what this rank calls.

    Attributes:
        rank: of this process in the group.
        peers: the other ranks.
        meeting: the same.
        signals: the same.
        posted: how many collectives this rank has posted.
    """

    def __init__(
        self, group: dist.ProcessGroup, meeting: Meeting, signals: Signals, log: CollectiveLog
    ) -> None:
        self.rank = group.rank()
        self.peers = [rank for rank in range(group.size()) if rank != self.rank]
        self.meeting = meeting
        self.signals = signals
        self._group_ref = weakref.ref(group)
        self._log = log
        self.posted = 0
        weakref.finalize(self, meeting.close).atexit = False

    def post(self, call: Call, at: int = 0, places: int = 0) -> int:
        """Tell that this rank has done its part of a collective.

        Args:
            call: the collective.
            at: where in this rank's range its tensors lie for peers to read.
            places: differs where ranks have their full parameters in different places.

        Returns:
            The number of the post, the same on all ranks.
        """
        self.posted += 1
        self.signals.describe(self.posted, _mark(call, places), at)
        self.signals.set(Count.POSTED, self.posted)
        return self.posted

    def wait(self, number: int, call: Call, places: int = 0) -> None:
        """Wait until all ranks have posted ``number``, and see that it was the same collective.

        Raises:
            PeerLostError: a peer is gone, or did not come in the time of the process group.
            RanksDivergedError: a peer has called something else.
            RuntimeError: a peer is so far ahead that its post is overwritten.
        """
        mark = _mark(call, places)
        for peer in self.peers:
            self._wait_for(Count.POSTED, peer, number, call.text)
            if self.signals.mark(number, peer) != mark:
                self._check_room(number, peer)
                self._diverged(call)
            self._check_room(number, peer)

    def wait_until(self, number: int, call: Call) -> None:
        """Wait until all ranks have posted ``number``, for the sake of ``call``, which follows it.

        Raises:
            PeerLostError: a peer is gone, or did not come in the time of the process group.
            RanksDivergedError: a peer has called something else.
        """
        for peer in self.peers:
            self._wait_for(Count.POSTED, peer, number, call.text)

    def place(self, number: int, rank: int) -> int:
        """Where in its range ``rank`` has laid out the tensors of post ``number``.

        Raises:
            RuntimeError: it may have been overwritten.
        """
        place = self.signals.place(number, rank)
        self._check_room(number, rank)
        return place

    def _wait_for(self, count: Count, peer: int, value: int, doing: str) -> None:
        """Sleep until ``peer`` has come as far as ``value``."""
        if self.signals.get(count, peer) >= value:
            return
        start = time.monotonic()
        compared = start
        while not self.signals.sleep(count, peer, value, _LOOK_SECONDS):
            now = time.monotonic()
            gone = self.meeting.gone()
            # Whoever is gone before it came so far never will; another may stay where it waits
            # for that one.
            if any(self.signals.get(count, each) < value for each in gone):
                self._log.compare_if_possible()
                cause = RuntimeError("its socket is closed")
                raise peer_lost(self._group, doing, cause, gone)
            if now - compared > _COMPARE_SECONDS:
                compared = now
                self._log.compare_if_possible()
            if now - start > c10d.timeout_of(self._group):
                cause = RuntimeError("timed out")
                raise peer_lost(self._group, doing, cause, self._furthest_behind())

    def _furthest_behind(self) -> list[int]:
        """The peers that have posted least: the others may be waiting for them, as this rank is."""
        posted = {peer: self.signals.get(Count.POSTED, peer) for peer in self.peers}
        return [peer for peer in self.peers if posted[peer] == min(posted.values())]

    def _check_room(self, number: int, peer: int) -> None:
        """Raise where ``peer`` may have overwritten what it told of collective ``number``."""
        behind = self.signals.get(Count.POSTED, peer) - number
        if behind >= MARKS - 1:  # the next one may be about to overwrite it
            raise RuntimeError(
                f"rank {self.rank} waits for a collective that is {behind} behind those of rank "
                f"{peer}; shared memory has room for {MARKS - 1} under way. Wait for them earlier, "
                "as with a smaller set_reduce_scatter_max_input_buffers"
            )

    def _diverged(self, call: Call) -> None:
        """Raise, with what the peer calls it if it says so in time."""
        deadline = time.monotonic() + 2 * _COMPARE_SECONDS
        while time.monotonic() < deadline:
            self._log.compare_if_possible()
            time.sleep(_LOOK_SECONDS)
        raise RanksDivergedError(f"ranks have diverged at {call.text}: not all of them called it")

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the process group of this transport has been destroyed")
        return group


def _mark(call: Call, places: int) -> int:
    """A 32-bit number that differs where ranks call, or have their full parameters, differently."""
    return (call.mark ^ places) & 0xFFFFFFFF
