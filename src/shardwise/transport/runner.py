"""Who drives collectives of several steps while the program computes.

Such a collective is a generator: it yields the work of each step, and goes on when that is over.
What goes on beside the program does so in the order of the calls. So if every rank makes the same
calls in the same order, what they send has the same order on all ranks, whatever a rank waits for
first.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.base import devices
from shardwise.transport.base import PendingWork, Work
from shardwise.transport.peers import Job
from shardwise.transport.waiter import JobThread, Launched

_here = threading.local()


def is_beside() -> bool:
    """Whether this thread does, or queues, what goes on beside the program."""
    return getattr(_here, "depth", 0) > 0


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    before = getattr(_here, "depth", 0)
    try:
        _here.depth = before + 1
        yield
    finally:
        _here.depth = before


class Exchange(PendingWork):
    """A step that a thread can wait for while that of the program watches the peers.

    Args:
        finish: as in :class:`~shardwise.transport.base.PendingWork`.
        land: waits without a look at the peers.
    """

    def __init__(self, finish: Callable[[], None], land: Callable[[], None]) -> None:
        super().__init__(finish)
        self._land: Callable[[], None] | None = land

    def land(self) -> None:
        """Wait without a look at the peers.

        Raises:
            RuntimeError: a peer is lost, in the words of the backend.
        """
        if self._land is not None:
            self._land()
            self._land = None


class SteppedWork:
    """A collective under way, whose first step begins at once.

    Args:
        steps: yields the work of each step.
    """

    def __init__(self, steps: Iterator[Launched]) -> None:
        self._steps = steps
        self._under_way = next(steps, None)
        self._over = 0
        self._failure: BaseException | None = None

    def reach(self, count: int, end: Callable[[Any], None] | None = None) -> None:
        """Go on until some steps are over and the next has begun. What failed stays failed.

        Args:
            count: of the steps; nothing is done if they are over.
            end: waits for a step, if it is not to be waited for as usual.

        Raises:
            PeerLostError: a peer died, left, or did not answer in time.
            RanksDivergedError: a peer made another call.
        """
        if self._failure is not None:
            raise self._failure
        try:
            while self._under_way is not None and self._over < count:
                if end is None:
                    self._under_way.wait()
                else:
                    end(self._under_way)
                self._over += 1
                self._under_way = next(self._steps, None)
        except BaseException as error:
            self._failure = error
            raise

    def wait(self) -> None:
        """Complete the collective; errors are those of :meth:`reach`."""
        self.reach(sys.maxsize)


def wait_for_all(works: Sequence[Work]) -> Work:
    """Return the works of one call as one."""
    if len(works) == 1:
        return works[0]

    def finish() -> None:
        for work in works:
            work.wait()

    return PendingWork(finish)


class Turn(enum.Enum):
    """When jobs are done."""

    THREAD = "by a thread, at once"
    NEXT_CALL = "before the next call, or when one is waited for"
    WAIT = "when one is waited for"
    CALL = "in the call"


class BesideJob(Job):
    """Something that is done beside the program.

    Args:
        function: what it does.
        left: jobs that are not done before one is waited for, in their order.
    """

    def __init__(self, function: Callable[[], None], left: deque[BesideJob]) -> None:
        super().__init__(function)
        self._left = left

    def run(self) -> None:
        """Do it, and keep what it raises for :meth:`wait`."""
        with _beside(), torch.no_grad():  # a setting of each thread
            super().run()

    def wait(self) -> None:
        """Wait until it is done; raise what it raised."""
        while self in self._left:
            self._left.popleft().run()
        self.sleep()
        if self.error is not None:
            raise self.error


class Runner:
    """Drives collectives beside the program: on a stream, or as jobs in the order of the calls.

    Args:
        turn: when jobs are done.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._left: deque[BesideJob] = deque()
        self._thread = JobThread("shardwise-background")
        self._stream: torch.Stream | None = None

    def start(self, steps: Iterator[Launched], device: torch.device, first: int) -> Work:
        """Start a collective that is completed whether or not it is waited for.

        Args:
            steps: yields the work of each step.
            device: of its tensors.
            first: how many of its steps are waited for now, unless there are streams.
        """
        if devices.has_streams(device):
            return self.queue(steps, device)
        run = SteppedWork(steps)
        run.reach(first)
        return PendingWork(self.submit(run.wait).wait)

    def start_watched(
        self, steps: Iterator[Exchange], device: torch.device, watch: Callable[[BesideJob], None]
    ) -> Work:
        """Start a collective whose second step begins by itself. Who waits does what is left.

        Args:
            steps: yields the work of each step.
            device: of its tensors.
            watch: waits for the job, in which the first step lands, while it watches the peers.
        """
        if devices.has_streams(device):
            return self.queue(steps, device)
        run = SteppedWork(steps)
        job = self.submit(lambda: run.reach(1, Exchange.land))

        def finish() -> None:
            watch(job)
            run.wait()

        return PendingWork(finish)

    def queue(self, steps: Iterator[Launched], device: torch.device) -> Work:
        """Queue all steps on a stream beside the one that computes; without streams, begin.

        Memory that the steps allocate belongs to that stream. Before it allocates the next one in
        its place, it waits for all that the computing stream has read of it.
        """
        if is_beside() or not devices.has_streams(device):
            return SteppedWork(steps)
        if self._stream is None:
            self._stream = devices.new_stream(device)
        self._stream.wait_stream(devices.current_stream(device))
        with self._stream, _beside():
            for step in steps:
                step.wait()
            done = devices.current_stream(device).record_event()
        return PendingWork(lambda: devices.current_stream(device).wait_event(done))

    def submit(self, function: Callable[[], None]) -> BesideJob:
        """Do a job after those that came before."""
        job = BesideJob(function, self._left)
        if self._turn is Turn.CALL:
            job.run()
        elif self._turn is not Turn.THREAD:
            self._left.append(job)
        else:
            self._thread.put(job)
        return job

    def catch_up(self) -> None:
        """Do what has to be done before the next call."""
        while self._left and self._turn is Turn.NEXT_CALL:
            self._left.popleft().run()
