"""Sequence numbers by which ranks that share memory tell each other how far they have come.

Every rank has a record in shared memory, which only that rank writes to:

    posted     the number of collectives of which it has done its part
    done       the number of collectives whose staged tensors it no longer reads
    pulse      changes whenever one of the two does; other ranks sleep on it
    digests    what each recent collective was, to check that all ranks call the same
    offsets    where the rank staged the tensors that its peers read in each of them

A rank that has done its part of a collective *posts* it under the next number. A rank that needs
what a peer did waits for that number, and compares digests. Ranks that wait sleep, and look up now
and then for peers that are gone.
"""

from __future__ import annotations

import ctypes
import enum
import time
import weakref
from collections.abc import Sequence

from shardwise.base import libc, observe
from shardwise.base.errors import RanksDivergedError
from shardwise.base.observe import Activity
from shardwise.transport.collective_log import CollectiveLog, LoggedCall
from shardwise.transport.peers import Pace, Peers, PeerWatch
from shardwise.transport.shm.arena import Arena, Window, whole_pages
from shardwise.transport.shm.handshake import Connections

#: Collectives that may be under way at once.
CAPACITY = 4096

#: A rank that is gone has done all that it ever will.
_PACE = Pace(0.1, 0.1, looks=1)
#: Seconds that a rank takes at most to publish what it called, once it waits for longer than usual.
_PUBLISH_SECONDS = 6.0

_CACHE_LINE = 64
_PULSE_AT = 2 * _CACHE_LINE
_DIGESTS_AT = 3 * _CACHE_LINE
_OFFSETS_AT = _DIGESTS_AT + 4 * CAPACITY
_STRIDE = _OFFSETS_AT + 8 * CAPACITY


class Count(enum.IntEnum):
    """What is counted; each in a cache line of its own."""

    POSTED = 0
    DONE = 1


class Sync:
    """The posts of the ranks of one process group, and waiting for them.

    Args:
        peers: the ranks of the group.
        connections: to those ranks; closed when this object is gone.
        numbers: their sequence numbers.
        log: what this rank calls.

    Attributes:
        rank: this process's rank in the group.
        others: all other ranks in the group.
        connections: as passed.
        numbers: as passed.
        posted: the number of collectives that this rank has posted.
        waited: the number of the last collective that this rank knows all ranks have posted.
    """

    def __init__(
        self, peers: Peers, connections: Connections, numbers: SequenceNumbers, log: CollectiveLog
    ) -> None:
        self.rank = peers.rank
        self.others = peers.others
        self.connections = connections
        self.numbers = numbers
        self.posted = 0
        self.waited = 0
        self._peers = peers
        self._log = log
        weakref.finalize(self, connections.close).atexit = False

    def post(self, call: LoggedCall, offset: int = 0, places: int = 0) -> int:
        """Announce that this rank has done its part of a collective.

        Args:
            call: the collective.
            offset: where in this rank's range of the arena its tensors are staged for peers.
            places: 32 bits that differ if ranks have their full parameters in different places.

        Returns:
            The number of the post, the same on all ranks.
        """
        self.posted += 1
        self.numbers.describe(self.posted, call.digest ^ places, offset)
        self.numbers.set(Count.POSTED, self.posted)
        return self.posted

    def wait(self, number: int, call: LoggedCall, places: int = 0) -> None:
        """Wait until all ranks have posted ``number``, and check that it was the same collective.

        Raises:
            PeerLostError: a peer is gone, or did not come within the timeout of the process group.
            RanksDivergedError: a peer has called something else.
            RuntimeError: a peer is so far ahead that its entry is overwritten.
        """
        for peer in self.others:
            self._wait_for(peer, number, call.text)
            if self.numbers.digest(number, peer) != call.digest ^ places:
                self._check_not_overwritten(number, peer)
                self._raise_diverged(call)
            self._check_not_overwritten(number, peer)
        self.waited = max(self.waited, number)

    def wait_until(self, number: int, call: LoggedCall) -> None:
        """Wait until all ranks have posted ``number``, on behalf of ``call``, which follows it.

        Raises:
            PeerLostError: a peer is gone, or did not come within the timeout of the process group.
            RanksDivergedError: a peer has called something else.
        """
        for peer in self.others:
            self._wait_for(peer, number, call.text)
        self.waited = max(self.waited, number)

    def offset(self, number: int, rank: int) -> int:
        """Return where in its range ``rank`` has staged the tensors of post ``number``.

        Raises:
            RuntimeError: the entry may be overwritten.
        """
        offset = self.numbers.offset(number, rank)
        self._check_not_overwritten(number, rank)
        return offset

    def _wait_for(self, peer: int, number: int, doing: str) -> None:
        """Sleep until ``peer`` has posted ``number``."""
        numbers = self.numbers
        if numbers.get(Count.POSTED, peer) >= number:
            return
        waiting = 0
        if observe.is_observed():
            waiting = observe.begin(Activity.PEER, str(self._peers.members[peer]))
        if not numbers.sleep(Count.POSTED, peer, number, _PACE.seconds):
            self._watch_for(peer, number, doing)  # hardly ever: a watch has its price
        observe.end(waiting)

    def _watch_for(self, peer: int, number: int, doing: str) -> None:
        """Sleep until ``peer`` has posted ``number``, or is gone."""
        numbers = self.numbers
        watch = PeerWatch(
            self._peers,
            doing,
            _PACE,
            find_gone=lambda ranks: self.connections.gone(),
            timeout=self._peers.timeout,
            compare=self._log.compare,
            blame=self._furthest_behind,
        )
        # This rank waits for one peer, but that one may wait for another, which is gone.
        watch.wait(
            lambda seconds: numbers.sleep(Count.POSTED, peer, number, seconds),
            lambda: [each for each in self.others if numbers.get(Count.POSTED, each) < number],
        )

    def _furthest_behind(self) -> list[int]:
        """Find the peers that have posted least: the others may be waiting for them too."""
        posted = {peer: self.numbers.get(Count.POSTED, peer) for peer in self.others}
        return [peer for peer in self.others if posted[peer] == min(posted.values())]

    def _check_not_overwritten(self, number: int, peer: int) -> None:
        """Raise if ``peer`` may have overwritten its entry for collective ``number``."""
        behind = self.numbers.get(Count.POSTED, peer) - number
        if behind >= CAPACITY - 1:  # the next one may be about to overwrite it
            raise RuntimeError(
                f"rank {self.rank} waits for a collective that is {behind} behind those of rank "
                f"{peer}; shared memory has room for {CAPACITY - 1} under way. Wait for them "
                "earlier, for example with a smaller set_reduce_scatter_max_input_buffers"
            )

    def _raise_diverged(self, call: LoggedCall) -> None:
        """Raise, with what the peer has called if it publishes that in time."""
        deadline = time.monotonic() + _PUBLISH_SECONDS
        while time.monotonic() < deadline:
            self._log.compare()
            time.sleep(_PACE.seconds)
        raise RanksDivergedError(f"ranks have diverged at {call.text}: not all of them called it")


class SequenceNumbers:
    """The records of all ranks in shared memory.

    Args:
        arena: the range of shared memory to keep them in.
        written: the ranks whose records this process writes: its own, or, in a rehearsal, all.
        world_size: the number of records.

    Attributes:
        written: as passed.
    """

    def __init__(self, arena: Arena, written: Sequence[int], world_size: int) -> None:
        nbytes = whole_pages(_STRIDE * world_size)
        self._window = Window(nbytes)
        self._window.open(arena.fd, arena.take(nbytes), libc.MAP_POPULATE)
        base = self._window.address
        count, pulse = ctypes.c_uint64.from_address, ctypes.c_uint32.from_address
        records = [base + _STRIDE * each for each in range(world_size)]
        self._counts = [[count(at + _CACHE_LINE * each) for each in Count] for at in records]
        self._pulses = [pulse(at + _PULSE_AT) for at in records]
        self._pulse_at = [at + _PULSE_AT for at in records]
        digests, offsets = ctypes.c_uint32 * CAPACITY, ctypes.c_uint64 * CAPACITY
        self._digests = [digests.from_address(at + _DIGESTS_AT) for at in records]
        self._offsets = [offsets.from_address(at + _OFFSETS_AT) for at in records]
        self.written = written

    def get(self, count: Count, rank: int) -> int:
        """Return how far ``rank`` has come."""
        return self._counts[rank][count].value

    def set(self, count: Count, value: int) -> None:
        """Announce how far this rank has come. Who sees this sees all that it wrote before."""
        for rank in self.written:
            self._counts[rank][count].value = value
            pulse = self._pulses[rank]
            pulse.value = (pulse.value + 1) & 0xFFFFFFFF
            libc.wake(self._pulse_at[rank])

    def describe(self, number: int, digest: int, offset: int) -> None:
        """Write what collective ``number`` is and where it is staged, before it is posted."""
        for rank in self.written:
            self._digests[rank][number % CAPACITY] = digest
            self._offsets[rank][number % CAPACITY] = offset

    def digest(self, number: int, rank: int) -> int:
        """Return what collective ``number`` is to ``rank``, which has posted it recently."""
        return self._digests[rank][number % CAPACITY]

    def offset(self, number: int, rank: int) -> int:
        """Return where ``rank`` has staged the tensors of collective ``number``."""
        return self._offsets[rank][number % CAPACITY]

    def sleep(self, count: Count, rank: int, value: int, seconds: float) -> bool:
        """Sleep until ``rank`` has come as far as ``value``, at most about ``seconds``.

        Returns:
            Whether it has.
        """
        pulse = self._pulses[rank].value
        if self.get(count, rank) >= value:
            return True
        libc.wait_on(self._pulse_at[rank], pulse, seconds)
        return self.get(count, rank) >= value
