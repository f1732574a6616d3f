"""Waiting for gloo, and giving up where gloo itself would not.

When a connection breaks, gloo wakes those who wait for a message that has not begun to travel, but
forgets a message that is halfway: that wait ends only with the timeout of the process group, and
cannot be interrupted. So a thread waits for gloo, and the caller waits for that thread while it
watches the peers. This costs about 15 µs.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from shardwise.base import observe
from shardwise.base.errors import RanksDivergedError, ShardwiseError
from shardwise.base.observe import Activity
from shardwise.transport.peers import Job, Loss, Pace, Peers, PeerWatch, how_lost

#: A message: what the peer sent before it left arrives at once.
MESSAGE = Pace(1.0, 1.0, looks=2)
#: A collective of the backend: those who are still there may have something left to exchange.
COLLECTIVE = Pace(1.0, 1.0, looks=5)
#: Seconds that works may take before this rank begins to watch its peers.
_FIRST_SECONDS = 0.1


class Launched(Protocol):
    """A work of ``torch.distributed``, as far as it is used here."""

    def wait(self) -> object:
        """Return once the results may be used."""


class JobThread:
    """A thread that does jobs in their order. It begins with the first and ends with this object.

    It is not joined: after a loss it may wait until the timeout of the process group.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def put(self, job: Job) -> None:
        """Do a job after those that came before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_jobs, args=(self._jobs,), daemon=True, name=self._name
            )
        if self._thread.ident is None:  # Ctrl-C may have come before it was started
            self._thread.start()
        self._jobs.put(job)


def _run_jobs(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would keep the tensors of the last call until the next


class Waiter:
    """A thread that waits for works of one gloo process group, on tensors on the CPU.

    Args:
        peers: the ranks of the group.
        compare: raises ``RanksDivergedError`` if the ranks have called different collectives.
    """

    def __init__(self, peers: Peers, compare: Callable[[], object] | None = None) -> None:
        self._peers = peers
        self._compare = compare
        self._thread = JobThread("shardwise-waiter")

    def wait(self, works: Sequence[tuple[Launched, int | None]], doing: str) -> None:
        """Wait for works, one after the other.

        Args:
            works: each with the rank of the one peer that it depends on, or ``None`` if it depends
                on all of them.
            doing: what they do, such as ``"the all-gather of 3 tensors"``.

        Raises:
            PeerLostError: a peer is gone, or did not answer in time.
            RanksDivergedError: a peer has called something else.
        """
        if not works:
            return
        job = _Works(works, self._peers.members if observe.is_observed() else ())
        self._thread.put(job)
        interrupt: BaseException | None = None
        while True:
            try:
                self._wait_for(job, doing)
                break
            except ShardwiseError:
                raise
            except BaseException as error:  # KeyboardInterrupt, or what a signal handler raises
                if interrupt is not None:
                    self._peers.hang_up()
                    raise
                # Gloo would go on writing to memory that its owner thinks is free: the collective
                # ends first, unless the user insists.
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if job.error is not None:
            raise self.explain(job.error, doing, job.peer) from job.error
        # What they hold is freed when the caller drops it, and not when the thread drops the job.
        job.works = ()

    def explain(self, error: BaseException, doing: str, peer: int | None) -> BaseException:
        """Return the error to raise for what the backend raised, and hang up if a peer is lost.

        Args:
            error: what the backend raised.
            doing: as in :meth:`wait`.
            peer: the rank of the peer at the other end, if there is only one.
        """
        how = how_lost(error)
        if how is None:
            return error
        if self._compare is not None:
            try:
                self._compare()  # the peer may have left because it noticed first
            except RanksDivergedError as diverged:
                self._peers.hang_up()
                return diverged
        ranks = [] if peer is None else [peer]
        if how is Loss.CLOSED:
            # The peer may have left because it lost another one, and that one is the cause.
            known = {*self._departed(()), *(self._peers.lost_by_others() or ())}
            ranks += sorted(known - {peer, self._peers.rank})
        self._peers.hang_up(ranks)
        return self._peers.lost(doing, ranks, how, error)

    def _wait_for(self, job: _Works, doing: str) -> None:
        """Return when the job is done; raise if it never will be."""
        if job.sleep(_FIRST_SECONDS):
            return
        for number in range(len(job.works)):
            self._wait_for_work(job, number, doing)

    def _wait_for_work(self, job: _Works, number: int, doing: str) -> None:
        _, peer = job.works[number]
        needed = self._peers.others if peer is None else [peer]
        watch = PeerWatch(
            self._peers,
            doing,
            COLLECTIVE if peer is None else MESSAGE,
            find_gone=self._departed,
            timeout=None,  # gloo has its own
            compare=self._compare,
            give_up=self._peers.hang_up,
        )
        watch.wait(lambda seconds: job.sleep_until(number, seconds), lambda: needed)

    def _departed(self, ranks: Sequence[int]) -> list[int]:
        """Find all who are gone, waited for or not: one of them is the cause."""
        return self._peers.departed(self._peers.others)


class _Works(Job):
    """Works that a thread waits for, and how far it has come.

    Args:
        works: as in :meth:`Waiter.wait`.
        members: the ranks of the group as ranks of the default group; empty: none watches.
    """

    def __init__(
        self, works: Sequence[tuple[Launched, int | None]], members: Sequence[int] = ()
    ) -> None:
        super().__init__(self._wait_for_all)
        self.works = works
        self._members = members
        self._current = 0

    @property
    def peer(self) -> int | None:
        """The peer that the current work depends on."""
        return self.works[self._current][1]

    def sleep_until(self, number: int, seconds: float) -> bool:
        """Sleep until the end of the job, at most for ``seconds``.

        Returns:
            Whether work ``number`` is over.
        """
        return self._current > number or self.sleep(seconds) or self._current > number

    def _wait_for_all(self) -> None:
        for self._current, (work, peer) in enumerate(self.works):  # noqa: B020
            waiting = 0
            if peer is not None and self._members:
                waiting = observe.begin(Activity.PEER, str(self._members[peer]))
            work.wait()
            observe.end(waiting)
