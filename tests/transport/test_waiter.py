"""Waiting for works in a thread: their errors, and interrupts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from unittest.mock import Mock

import pytest

from shardwise.base import observe
from shardwise.transport.peers import Peers
from shardwise.transport.waiter import Waiter
from tests.test_observe import Notes


class ImpatientError(Exception):
    """An error that the signal handler of these tests raises in the main thread."""


@pytest.fixture(autouse=True)
def _impatient_signal() -> Iterator[None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise ImpatientError

    before = signal.signal(signal.SIGUSR2, handler)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def waiter() -> Iterator[Waiter]:
    group = Mock()
    group.rank.return_value, group.size.return_value = 0, 1
    yield Waiter(Peers(group))
    del group  # which peers do not keep alive


class InterruptingWork:
    """A work whose wait interrupts the main thread several times, and ends later, or on request."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.may_end = threading.Event()
        self.ended = False

    def wait(self) -> None:
        for _ in range(self.times):
            time.sleep(0.4)  # the main thread has begun to wait by now
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)
        self.may_end.wait(self.times)
        self.ended = True


def test_works_are_waited_for_in_order(waiter: Waiter) -> None:
    order: list[int] = []
    works = [(Mock(wait=lambda i=i: order.append(i)), i) for i in range(5)]
    waiter.wait(works, "a test")
    assert order == [0, 1, 2, 3, 4]
    waiter.wait([], "a test")


def test_what_a_work_raises_arrives_in_the_thread_that_waits(waiter: Waiter) -> None:
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        waiter.wait([(Mock(wait=Mock(side_effect=RuntimeError("Invalid scalar type"))), 0)], "it")
    waiter.wait([(Mock(), 0)], "a test")  # the thread is still there


def test_an_interrupt_is_raised_when_the_collective_is_over(waiter: Waiter) -> None:
    work = InterruptingWork(1)
    with pytest.raises(ImpatientError):
        waiter.wait([(work, 0)], "a test")
    assert work.ended, "memory was released while messages could still write to it"


def test_a_second_interrupt_ends_the_wait_at_once(waiter: Waiter) -> None:
    work = InterruptingWork(2)
    with pytest.raises(ImpatientError):
        waiter.wait([(work, 0)], "a test")
    assert not work.ended
    work.may_end.set()


def test_a_wait_for_one_peer_is_reported_by_its_number_in_the_world() -> None:
    group, notes = Mock(), Notes()
    group.rank.return_value, group.size.return_value = 0, 2
    waiter = Waiter(Mock(wraps=Peers(group), members=[4, 6]))
    with observe.observing(notes):
        waiter.wait([(Mock(), 1), (Mock(), None)], "a test")
    assert notes.lines == ["wait for a peer of 6", "end of wait for a peer of 6"]


def test_the_thread_ends_with_the_waiter() -> None:
    group = Mock()
    group.rank.return_value, group.size.return_value = 0, 1
    waiter = Waiter(Peers(group))
    before = set(threading.enumerate())
    waiter.wait([(Mock(), 0)], "a test")
    (thread,) = set(threading.enumerate()) - before
    del waiter
    thread.join(10)
    assert not thread.is_alive()
