"""Waiting for gloo, and giving up where gloo itself would not.

When a connection breaks, gloo wakes those who wait for a message that has not begun to travel, but
forgets the one that is half way: its wait ends only with the timeout of the process group, half an
hour by default, and cannot be interrupted. So a thread waits for gloo, and the caller waits for
that thread, looking from time to time whether the peers are still there. That costs about 15 µs.

A rank that has lost a peer hangs up on all others, so that they learn it from where they wait.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from shardwise.errors import RanksDivergedError, ShardwiseError
from shardwise.transport.calls import CallLog
from shardwise.transport.peers import (
    departed,
    hang_up,
    peer_lost,
    tells_of_lost_peer,
    tells_of_stall,
)

_LOOK_SECONDS = 1.0
# After so long a wait, ranks look whether they wait for the same thing.
_COMPARE_SECONDS = 3.0
# So often may a wait find its peer gone. What the peer sent before it left arrives at once; a
# collective may have something left to exchange among those who are still there.
_LOOKS_AT_MESSAGE = 2
_LOOKS_AT_COLLECTIVE = 5


class Launched(Protocol):
    """What waits for collectives or messages of ``torch.distributed``."""

    def wait(self) -> object:
        """Return once the results may be used."""


class Waiter:
    """Waits for works of one gloo process group, on tensors on the CPU.

    Args:
        group: the process group.
        log: what this rank has called on it, to compare with its peers' after a while.
    """

    def __init__(self, group: dist.ProcessGroup, log: CallLog | None = None) -> None:
        self._group = group
        self._log = log
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def wait(self, works: Sequence[tuple[Launched, int | None]], doing: str) -> None:
        """Wait for works, one after the other.

        Args:
            works: each with the rank in the group of the one peer that it depends on, or ``None``
                where it depends on all of them.
            doing: what it is for, such as ``"the all-gather of 3 tensors"``.

        Raises:
            PeerLostError: a peer died, or did not answer in time.
            RanksDivergedError: a peer has called something else.
        """
        if not works:
            return
        job = _Job(works)
        if self._thread is None:
            # Nobody joins it: after a loss it may wait until the group's timeout.
            self._thread = threading.Thread(
                target=_work_off, args=(self._jobs,), daemon=True, name="shardwise-waiter"
            )
            self._thread.start()
        self._jobs.put(job)
        interrupt: BaseException | None = None
        while True:
            try:
                self._patience(job, doing)
                break
            except ShardwiseError:
                raise
            except BaseException as error:  # KeyboardInterrupt, or what a signal handler raises
                if interrupt is not None:
                    hang_up(self._group)
                    raise
                # Gloo would go on writing to memory that its owner thinks is free: the collective
                # ends first, unless the user insists.
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            raise self.explain(job.error, doing, job.peer) from job.error

    def _patience(self, job: _Job, doing: str) -> None:
        """Return when the job is done, or raise when it never will be."""
        looks, last = 0, -1
        seconds = 0.0
        while not (job.over or job.done.acquire(timeout=_LOOK_SECONDS)):
            seconds += _LOOK_SECONDS
            if seconds >= _COMPARE_SECONDS:
                self._compare()
            current, peer = job.current, job.peer
            gone = self._gone()
            missing = bool(gone) if peer is None else peer in gone
            looks = looks + 1 if missing and current == last else int(missing)
            last = current
            if looks >= (_LOOKS_AT_COLLECTIVE if peer is None else _LOOKS_AT_MESSAGE):
                self._compare()
                cause = RuntimeError("the connection broke while a message was half way")
                hang_up(self._group)
                raise peer_lost(self._group, doing, cause, gone)

    def _compare(self) -> None:
        """Raise if the calls of this rank are not those of its peers."""
        if self._log is None:
            return
        try:
            self._log.compare_if_possible()
        except RanksDivergedError:
            hang_up(self._group)
            raise

    def explain(self, error: BaseException, doing: str, peer: int | None) -> BaseException:
        """Return the error to raise for what the backend raised, and hang up if a peer is lost.

        Args:
            error: what the backend raised.
            doing: as in :meth:`wait`.
            peer: the peer at the other end, where there is one.
        """
        if not isinstance(error, RuntimeError) or not tells_of_lost_peer(error):
            return error
        try:
            self._compare()  # it may have left because it noticed first
        except RanksDivergedError as diverged:
            return diverged
        peers = [] if peer is None else [peer]
        if not tells_of_stall(error):
            # The peer may have left because it lost another one, and that one is the cause.
            peers += [other for other in self._gone() if other != peer]
        hang_up(self._group)
        return peer_lost(self._group, doing, error, peers)

    def _gone(self) -> list[int]:
        others = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        return departed(self._group, others)


class _Job:
    """Works that a thread waits for, and how far it has come."""

    def __init__(self, works: Sequence[tuple[Launched, int | None]]) -> None:
        self.current = 0
        self.error: BaseException | None = None
        self.over = False
        self.done = threading.Lock()  # held until the end
        self.done.acquire()
        self._works = works

    @property
    def peer(self) -> int | None:
        """The peer that the work now waited for depends on."""
        return self._works[self.current][1]

    def run(self) -> None:
        try:
            for self.current, (work, _) in enumerate(self._works):  # noqa: B020
                work.wait()
        except BaseException as error:  # whatever it was, the caller must know
            self.error = error
        finally:
            self.over = True
            self.done.release()


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would keep the tensors of the last call until the next
