"""What ranks that share memory tell each other of their collectives, and waiting for it.

A rank that has done its part of a collective *posts* it: under the next number, with a mark that
says what it called and where its tensors lie. Who needs what a peer did waits for that number, and
compares marks. Ranks that wait sleep, and look up now and then for peers that are gone.
"""

from __future__ import annotations

import time
import weakref

import torch.distributed as dist

from shardwise import _torch
from shardwise.errors import RanksDivergedError
from shardwise.transport.calls import Call, CallLog
from shardwise.transport.meeting import Meeting
from shardwise.transport.peers import peer_lost
from shardwise.transport.signals import MARKS, Count, Signals

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
        self, group: dist.ProcessGroup, meeting: Meeting, signals: Signals, log: CallLog
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
            if now - start > _torch.timeout_of(self._group):
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
