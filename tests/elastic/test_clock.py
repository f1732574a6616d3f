"""A clock that stands still while a process is suspended."""

from __future__ import annotations

import os
import threading
import warnings

import pytest

from shardwise.elastic.clock import Clock, process_clock


def test_the_time_of_a_suspension_does_not_count() -> None:
    at = 100.0
    clock = Clock(lambda: at)
    for _ in range(10):
        at += 0.1
        before = clock.now()
    assert before == pytest.approx(1.0)
    assert not clock.was_suspended(0.0, 0.0)
    at += 3600.0
    assert clock.now() - before <= 0.5
    assert clock.was_suspended(before, 3599.0)
    assert not clock.was_suspended(before, 3601.0)
    after = clock.now()
    assert not clock.was_suspended(after, 0.0), "that was before"
    at += 3600.0
    assert clock.was_suspended(after, 1.0), "asking is enough to notice"


def test_waits_take_as_long_as_they_may_without_suspensions() -> None:
    at = 0.0
    clock = Clock(lambda: at)
    waits, taken = clock.waits(1.0), 0.0

    def wait() -> None:
        nonlocal at, taken
        for seconds in waits:
            taken += seconds
            at += seconds

    at += next(waits)
    at += 3600.0
    with pytest.raises(TimeoutError):
        wait()
    assert 0.2 < taken < 0.8


def test_a_process_that_is_forked_has_a_clock_of_its_own() -> None:
    """No thread of the parent is in it, and the lock may be held for ever."""
    clock = process_clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the parent has threads
        pid = os.fork()
    if pid == 0:
        is_new = process_clock() is not clock
        is_new &= "shardwise clock" in [thread.name for thread in threading.enumerate()]
        os._exit(0 if is_new else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
