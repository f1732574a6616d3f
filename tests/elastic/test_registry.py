"""Report, plan, silence: what the end that serves sees, and what members get."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from shardwise.base.repeated import Repeated
from shardwise.elastic.clock import Clock
from shardwise.elastic.network import listening
from shardwise.elastic.registry import REPORT, Registry, RegistryClient
from shardwise.elastic.store import GuardedStore
from tests.waiting import wait_until

TOKEN = b"the token of all members"


@dataclass(frozen=True)
class Work:
    """A report."""

    done: int


@dataclass(frozen=True)
class Order:
    """A plan."""

    what: str


class Meeting:
    """A registry, its members, and a clock that the test turns."""

    def __init__(self, held: ExitStack) -> None:
        self._held, self.now = held, 0.0
        listener = listening("127.0.0.1")
        self.port = listener.getsockname()[1]
        registry = Registry(listener, TOKEN, Work, Clock(lambda: self.now))
        self.registry = held.enter_context(closing(registry))

    def join(self, name: str) -> RegistryClient[Work, Order]:
        store = GuardedStore("127.0.0.1", self.port, TOKEN, name, 30.0)
        self._held.callback(store.close)
        return RegistryClient(store, name, Order)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ExitStack() as held:
        yield Meeting(held)


def test_what_members_report_is_seen_and_what_is_published_is_news_once(meeting: Meeting) -> None:
    first, second = meeting.join("first"), meeting.join("second")
    first.report(Work(1))
    second.report(Work(2))
    first.report(Work(3))
    assert meeting.registry.look().reports == {"first": Work(3), "second": Work(2)}
    assert meeting.registry.publish(Order("go on"))
    assert not meeting.registry.publish(Order("go on"))
    assert [first.news(), first.news(), second.news()] == [Order("go on"), None, Order("go on")]
    assert meeting.registry.publish(Order("stop"))
    assert first.news() == Order("stop")


def test_a_report_that_has_not_changed_is_not_sent_again(meeting: Meeting) -> None:
    member = meeting.join("member")
    member.report(Work(1))
    meeting.registry.store.forget(REPORT)
    member.report(Work(1))
    member.report(None)
    assert meeting.registry.look().reports == {}
    assert member.reported == Work(1)


def test_silence_is_measured_by_the_clock_of_the_end_that_serves(meeting: Meeting) -> None:
    quiet, asking = meeting.join("quiet"), meeting.join("asking")
    quiet.report(Work(1))
    for _ in range(8):  # a clock that stands still in a suspension takes half a second at most
        meeting.now += 0.5
        asking.report(Work(int(meeting.now)))
        asking.store.check(["anything"])
    assert meeting.registry.look().silence == {"quiet": 4.0, "asking": 0.0}
    meeting.now += 3600.0
    assert meeting.registry.look().silence["quiet"] == 4.5, "the server was suspended"


def test_who_is_lost_is_told_from_who_has_said_goodbye(meeting: Meeting) -> None:
    lost, gone = meeting.join("lost"), meeting.join("gone")
    lost.report(Work(1))
    gone.report(Work(2))
    gone.store.close()
    meeting.registry.store.drop("lost", "counts as lost")
    wait_until(lambda: not meeting.registry.look().silence)
    presence = meeting.registry.look()
    assert presence.closed == {"lost": "counts as lost"}
    assert presence.reports == {"lost": Work(1), "gone": Work(2)}
    meeting.registry.forget_all_but({"gone"})
    assert meeting.registry.look().reports == {"gone": Work(2)}


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[]", b"3", b"{}", b'{"done":"1"}', b"[" * 99_999])
def test_what_is_no_report_and_no_plan_is_left_out(meeting: Meeting, text: bytes) -> None:
    member = meeting.join("member")
    member.store.set(f"{REPORT}member", text)
    assert meeting.registry.look().reports == {}
    meeting.registry.store.put("server/plan", text)
    with pytest.raises(ValueError, match=r"expected (the fields of )?Order"):
        member.news()
    meeting.registry.publish(Order("go on"))
    assert member.news() == Order("go on")
    with pytest.raises(ValueError, match="expected none that begins with"):
        member.store.set("server/plan", b"")


def test_what_is_repeated_ends_when_it_is_closed_or_fails() -> None:
    calls = threading.Semaphore(0)
    often = Repeated(calls.release, lambda: 60.0, "often")
    often.close()
    often = Repeated(calls.release, lambda: 60.0, "often")
    often.start()
    often.wake()
    assert calls.acquire(timeout=60.0)
    often.close()
    assert not often.is_running
    assert not calls.acquire(blocking=False), "closing it is no reason to call it"

    def fail() -> None:
        raise SystemExit(3)

    failing = Repeated(fail, lambda: 0.0, "failing")
    failing.start()
    failing.close()
    failing = Repeated(fail, lambda: 0.0, "failing")
    failing.start()
    wait_until(lambda: failing.error is not None)
    assert isinstance(failing.error, SystemExit)
