"""A thread that does the middle of collectives while the program computes."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch


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
        try:
            with torch.no_grad():  # a setting of each thread
                self._function()
        except BaseException as error:
            self._error = error
        finally:
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
