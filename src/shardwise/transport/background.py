"""Who does the middle of collectives while the program computes: a thread, or the next call.

Jobs are done in the order in which they come. So if every rank submits the same jobs in the same
order, what they send has the same order on all ranks, whatever a rank waits for first.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch

_running = threading.local()


def in_job() -> bool:
    """Whether a job is running in this thread."""
    return getattr(_running, "jobs", 0) > 0


class Job:
    """Something that another thread does.

    Args:
        function: what it does.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def run(self) -> None:
        """Do it, and keep what it raises for whoever waits."""
        assert self._function is not None
        _running.jobs = getattr(_running, "jobs", 0) + 1
        try:
            with torch.no_grad():  # a setting of each thread
                self._function()
        except BaseException as error:
            self._error = error
        finally:
            _running.jobs -= 1
            self._function = None  # what it holds is freed now
            self._is_done.set()

    def wait(self) -> None:
        """Wait until it is done; raise what it raised."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class Background:
    """A thread that does jobs in the order in which they come. It starts with the first."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, function: Callable[[], None]) -> Job:
        """Let the thread call a function after those that came before."""
        job = Job(function)
        if self._thread is None:
            # Nobody joins it: after a loss it may wait until the group's timeout.
            self._thread = threading.Thread(
                target=_run_jobs, args=(self._jobs,), daemon=True, name="shardwise-background"
            )
            self._thread.start()
        self._jobs.put(job)
        return job

    def catch_up(self) -> None:
        """Do what has to be done before the next call: nothing, the thread does it."""


class Deferred(Background):
    """The same without a thread: jobs are done before the next call, or when one is waited for."""

    def __init__(self) -> None:
        self._left: deque[Job] = deque()

    def submit(self, function: Callable[[], None]) -> Job:
        """Keep a function for later."""
        job = _DeferredJob(function, self._left)
        self._left.append(job)
        return job

    def catch_up(self) -> None:
        """Do all jobs."""
        while self._left:
            self._left.popleft().run()


class _DeferredJob(Job):
    def __init__(self, function: Callable[[], None], left: deque[Job]) -> None:
        super().__init__(function)
        self._left = left

    def wait(self) -> None:
        """Do it, after those that came before; raise what it raised."""
        while self in self._left:
            self._left.popleft().run()
        super().wait()


class AtTheWait(Deferred):
    """The same, but not before one is waited for: a rehearsal has no other ranks to wait for."""

    def catch_up(self) -> None:
        """Do nothing yet."""


class Foreground(Background):
    """The same without a thread: jobs are done when they come. For a rehearsal."""

    def submit(self, function: Callable[[], None]) -> Job:
        """Call the function now."""
        job = Job(function)
        job.run()
        return job


def _run_jobs(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would live until the next
