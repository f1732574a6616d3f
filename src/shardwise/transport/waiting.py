"""Waiting for gloo, and giving up where gloo itself would not.

When a connection breaks, gloo wakes those who wait for a message that has not begun to travel, but
forgets the one that is half way: its wait ends only with the timeout of the process group, half an
hour by default. A wait cannot be interrupted either. So a thread waits for gloo, and the caller
waits for that thread, looking from time to time whether the peers are still there. That costs about
15 µs a wait, and lets signals (Ctrl-C) through as well.

A peer that is gone is not lost if it was done before it left: all that it sent has arrived, and all
that it was sent has left. Then those works, waited for by themselves, end at once.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.transport.peers import peer_lost, tells_of_lost_peer, tells_of_stall

#: The first tag that messages must not use; nothing ever arrives for it.
PROBE_TAG = 2**30

_LOOK_SECONDS = 1.0
# In so many looks the works of a peer that is gone must end. A collective may have something left
# to exchange among the others.
_LOOKS_FOR_MESSAGES = 1
_LOOKS_FOR_COLLECTIVE = 4


class Launched(Protocol):
    """What waits for collectives or messages of ``torch.distributed``."""

    def wait(self) -> object:
        """Return once the results may be used."""


class Waiter:
    """Waits for works of one gloo process group, on tensors on the CPU.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
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
        """
        if not works:
            return
        job = _Job([_Awaited(work, peer) for work, peer in works])
        if self._thread is None:
            self._thread = _start(_work_off, self._jobs)
        self._jobs.put(job)
        examined: dict[int, _Examination] = {}
        while not job.done.acquire(timeout=_LOOK_SECONDS):
            gone = self._gone()
            for peer in gone:
                examination = examined.get(peer)
                if examination is None:
                    examined[peer] = _Examination(job, peer)
                elif examination.finds_lost():
                    cause = RuntimeError("the connection broke while a message was half way")
                    raise peer_lost(self._group, doing, cause, gone)
        if job.failed is not None:
            error, culprit = job.failed
            raise self.explain(error, doing, culprit) from error

    def explain(self, error: BaseException, doing: str, peer: int | None) -> BaseException:
        """Return the error to raise for what the backend raised.

        Args:
            error: what the backend raised.
            doing: as in :meth:`wait`.
            peer: the peer at the other end, where there is one.
        """
        if not isinstance(error, RuntimeError) or not tells_of_lost_peer(error):
            return error
        peers = [] if peer is None else [peer]
        if not tells_of_stall(error):
            # The peer may have left because it lost another one, and that one is the cause.
            peers += [other for other in self._gone() if other != peer]
        return peer_lost(self._group, doing, error, peers)

    def _gone(self) -> list[int]:
        """Peers whose connection is closed: no message to them can even be posted."""
        gone = []
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                try:
                    self._group.recv([torch.empty(1)], peer, PROBE_TAG)
                except RuntimeError:
                    gone.append(peer)
        return gone


class _Awaited:
    """One work; two threads may wait for it, though gloo allows for one only."""

    def __init__(self, work: Launched, peer: int | None) -> None:
        self.peer = peer
        self._work: Launched | None = work
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None


class _Job:
    """Works that a thread waits for."""

    def __init__(self, awaited: Sequence[_Awaited]) -> None:
        self.awaited = awaited
        self.failed: tuple[BaseException, int | None] | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        for each in self.awaited:
            try:
                each.wait()
            except BaseException as error:  # whatever it was, the caller must know
                self.failed = error, each.peer
                break
        self.done.release()


class _Examination:
    """Finds out whether a peer that is gone did its part of a job."""

    def __init__(self, job: _Job, peer: int) -> None:
        part = [each for each in job.awaited if each.peer in (peer, None)]
        collective = any(each.peer is None for each in part)
        self._looks_left = _LOOKS_FOR_COLLECTIVE if collective else _LOOKS_FOR_MESSAGES
        self._part = _Job(part)
        self._ended = False
        _start(self._part.run)

    def finds_lost(self) -> bool:
        """Look; whether the peer is lost."""
        self._ended = self._ended or self._part.done.acquire(blocking=False)
        if self._ended:
            return self._part.failed is not None
        self._looks_left -= 1
        return self._looks_left <= 0


def _start(function: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that nobody joins: after a loss it may wait until the group's timeout."""
    thread = threading.Thread(target=function, args=args, daemon=True, name="shardwise-waiter")
    thread.start()
    return thread


def _work_off(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would keep the tensors of the last call until the next
