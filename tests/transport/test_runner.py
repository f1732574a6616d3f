"""Collectives of several steps: who takes the steps, in which order, and what if one fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from shardwise.transport.base import PendingWork
from shardwise.transport.runner import BesideJob, Exchange, Runner, SteppedWork, Turn, is_beside

CPU = torch.device("cpu")


class Steps:
    """Two steps of a collective, and what has happened, in order."""

    def __init__(self, name: str = "", fails: str = "") -> None:
        self.seen: list[str] = []
        self.threads: dict[str, str] = {}
        self.beside: dict[str, bool] = {}
        self._name = name
        self._fails = fails

    def note(self, what: str) -> None:
        self.seen.append(self._name + what)
        self.threads[what] = threading.current_thread().name
        self.beside[what] = is_beside()
        if what == self._fails:
            raise RuntimeError(what)

    def __iter__(self) -> Iterator[Exchange]:
        self.note("begin")
        yield Exchange(lambda: self.note("wait 1"), lambda: self.note("land 1"))
        self.note("go on")
        yield Exchange(lambda: self.note("wait 2"), lambda: self.note("land 2"))
        self.note("end")


ALL = ["begin", "wait 1", "go on", "wait 2", "end"]


def test_steps_are_taken_at_the_wait_or_one_at_a_time() -> None:
    steps = Steps()
    work = SteppedWork(iter(steps))
    assert steps.seen == ["begin"]
    for _ in range(2):
        work.reach(1)
        assert steps.seen == ["begin", "wait 1", "go on"]
    for _ in range(2):
        work.wait()
    work.reach(1)
    assert steps.seen == ALL


@pytest.mark.parametrize("step", ["wait 1", "go on", "wait 2", "end"])
def test_a_work_that_failed_stays_failed(step: str) -> None:
    steps = Steps(fails=step)
    work = SteppedWork(iter(steps))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=step):
            work.wait()
        with pytest.raises(RuntimeError, match=step):
            work.reach(1)
    assert steps.seen == ALL[: ALL.index(step) + 1], "nothing is done twice, or after it"


@pytest.mark.parametrize(
    ("turn", "in_call", "in_next"),
    [
        (Turn.CALL, ALL, ALL),
        (Turn.NEXT_CALL, ALL[:3], ALL),
        (Turn.WAIT, ALL[:3], ALL[:3]),
    ],
)
def test_what_follows_a_wait_has_its_turn(
    turn: Turn, in_call: list[str], in_next: list[str]
) -> None:
    runner, steps = Runner(turn), Steps()
    work = runner.start(iter(steps), CPU, first=1)
    assert steps.seen == in_call
    runner.catch_up()
    assert steps.seen == in_next
    for _ in range(2):
        work.wait()
    assert steps.seen == ALL
    assert not steps.beside["go on"]
    assert steps.beside["end"], "it has memory of its own to work in"


def test_jobs_are_done_in_the_order_of_the_calls_whatever_is_waited_for_first() -> None:
    runner, first, second = Runner(Turn.WAIT), Steps("1 "), Steps("2 ")
    second.seen = first.seen
    works = [runner.start(iter(each), CPU, first=0) for each in (first, second)]
    works[1].wait()
    begun = ["1 begin", "2 begin"]
    assert first.seen == [
        *begun,
        *(f"1 {each}" for each in ALL[1:]),
        *(f"2 {each}" for each in ALL[1:]),
    ]
    works[0].wait()


def test_a_thread_completes_what_nobody_waits_for() -> None:
    runner, steps, over = Runner(Turn.THREAD), Steps(), threading.Event()
    runner.start(iter(steps), CPU, first=1)
    runner.submit(over.set)
    assert over.wait(60)
    assert steps.seen == ALL
    assert steps.threads["go on"] == threading.current_thread().name
    assert steps.threads["end"] == "shardwise-background"


@pytest.mark.parametrize("turn", list(Turn))
def test_a_job_lands_the_first_step_while_the_program_watches(turn: Turn) -> None:
    runner, steps, watched = Runner(turn), Steps(), []

    def watch(job: BesideJob) -> None:
        watched.append(job)
        job.wait()

    work = runner.start_watched(iter(steps), CPU, watch)
    for _ in range(2):
        work.wait()
    assert steps.seen == ["begin", "land 1", "go on", "wait 2", "end"]
    assert len(watched) == 1
    assert (steps.beside["go on"], steps.beside["end"]) == (True, False)


def test_what_a_job_raises_is_raised_at_the_wait_and_ends_no_others() -> None:
    runner = Runner(Turn.THREAD)
    failing = runner.start(iter(Steps(fails="go on")), CPU, first=0)
    fine = runner.start(iter(Steps()), CPU, first=0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="go on"):
            failing.wait()
    fine.wait()


def test_without_streams_queued_steps_begin_and_end_at_the_wait() -> None:
    steps = Steps()
    work = Runner(Turn.THREAD).queue(iter(steps), CPU)
    assert steps.seen == ["begin"]
    PendingWork(work.wait).wait()
    assert steps.seen == ALL
