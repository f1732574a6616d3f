"""Hosts that meet over loopback; threads stand for agents and their ranks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from shardwise.base.errors import UserError
from shardwise.elastic import membership, rendezvous
from shardwise.elastic.clock import Clock
from shardwise.elastic.hosts import UNNUMBERED, Nodes
from shardwise.elastic.membership import HostLoss, HostReport, JobState, Next, Verdict
from shardwise.elastic.network import listening
from shardwise.elastic.outcome import Outcome, Result, StoppedBy
from shardwise.elastic.registry import Presence, Registry
from shardwise.elastic.rendezvous import Order, Rendezvous
from tests.waiting import wait_until

WAIT = 60.0  # seconds that anything may take on a busy machine
# Seconds, where a host is silent. One that is held up for half as long counts as suspended.
SILENCE = 4.0
OPTIONS = {"--lr": 0.1}
SAVED = Outcome(128 + 15, stopped_by=StoppedBy.RANK)
DONE = Outcome(0)
CRASHED = Outcome(1, Result.CRASHED)
SECONDARY = Outcome(1, Result.SECONDARY)
INTERRUPTED = Outcome(128 + 2, stopped_by=StoppedBy.INTERRUPT)
TERMINATED = Outcome(128 + 15, stopped_by=StoppedBy.TERMINATE)
OVER = Verdict(Next.END)


class Place:
    """A host whose ranks train until they are asked to save, or the test ends them."""

    def __init__(self, nodes: Nodes, nproc: int, restarts: int, *, steps: bool) -> None:
        self.steps = steps  # whether its ranks complete a step
        self.said: list[str] = []
        self.worlds: list[tuple[int, int]] = []  # number and count of hosts, by generation
        self.numbers: list[int] = []  # of the generations
        self.verdicts: list[Verdict] = []
        self.error = ""
        self.exit_code = 0
        self.ending: Outcome | None = None
        self.signal = threading.Event()  # asks to stop while it waits
        self.gone = threading.Event()
        self._go_on = threading.Event()  # once it is suspended
        self._clock = Clock()
        self.rendezvous = Rendezvous(nodes, nproc, restarts, self.signal.is_set, self._clock)
        self.thread = threading.Thread(target=self._run, daemon=True)
        _said[self.thread] = self.said
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.gone.is_set():
                info = self.rendezvous.next_rendezvous()
                self.numbers.append(self.rendezvous.generation)
                self.worlds.append((info.rank, info.world_size))
                verdict = self._train()
                if verdict is None:
                    return
                self.verdicts.append(verdict)
                if not verdict.next.begins_again:
                    break
        except UserError as error:
            self.error, self.exit_code = str(error), error.exit_code
        except RendezvousGracefulExitError as error:
            self.error = str(error)
        if not self.gone.is_set():
            self.rendezvous.shutdown()

    def _train(self) -> Verdict | None:
        """Run one generation; return None if this host vanishes."""
        outcome = None
        while True:
            order = self.rendezvous.order()
            if self.gone.is_set():
                return None
            if outcome is None:
                if self.steps:
                    self.rendezvous.report_step()
                if self.ending is not None:
                    outcome, self.ending = self.ending, None
                elif order is Order.ABORT:
                    outcome = Outcome(1)
                elif order is Order.SAVE_AND_STOP and self.steps:
                    outcome = SAVED
                if outcome is not None:
                    self.rendezvous.end(outcome)
            elif self.rendezvous.verdict is not None:
                return self.rendezvous.verdict
            time.sleep(0.005)

    def vanish(self) -> None:
        """End as a process that is killed."""
        mine = self.rendezvous
        self._go_on.set()
        self.gone.set()
        self.signal.set()
        for repeated in (mine._touch, mine._guide):
            repeated._closing.set()
            repeated.wake()
        if mine._client is not None:  # without a goodbye
            with contextlib.suppress(OSError):
                mine._client.store._socket.shutdown(socket.SHUT_RDWR)
        if mine._registry is not None:
            mine._registry.close()
        self.thread.join(WAIT)
        mine._touch.close(WAIT)
        if mine._client is not None:
            mine._client.store.close()

    def suspend(self, before: str = "_turn") -> Callable[[], None]:
        """Stop all of its threads, as SIGSTOP does; return what lets them go on.

        Args:
            before: the method of the rendezvous that its thread would call next.
        """
        hangs = threading.Event()
        mine, method = self.rendezvous, getattr(self.rendezvous, before)

        def hang(*args: Any) -> None:
            with self._clock._lock:
                hangs.set()
                self._go_on.wait(WAIT)
            method(*args)

        setattr(mine, before, hang)
        assert hangs.wait(WAIT)  # it may be in the middle of a request to its own server
        if mine._registry is not None:
            mine._registry.store._call(self._go_on.wait)
        return self._go_on.set

    @property
    def serves(self) -> bool:
        return self.rendezvous._state is not None


_said: dict[threading.Thread, list[str]] = {}  # the lines for users, by host


class Job:
    """A job at a free port of this machine, and the hosts that come."""

    def __init__(
        self,
        nnodes: str,
        *,
        restarts: int = 0,
        timeout: float = WAIT,
        token: bytes = b"",
        odd: int = 3,
    ) -> None:
        with listening("127.0.0.1") as free:
            where = f"127.0.0.1:{free.getsockname()[1]}"
        first = Nodes.of(nnodes, 0, where, timeout)
        assert first is not None
        self.first = replace(first, token=token)
        self.restarts, self.odd = restarts, odd
        self.places: list[Place] = []

    def _why_not(self, hosts: int) -> str | None:
        return "--batch-tokens: found 64" if hosts == self.odd else None

    def come(
        self, rank: int = UNNUMBERED, *, nproc: int = 1, steps: bool = True, **changed: Any
    ) -> Place:
        """Start a host."""
        own = {"options": OPTIONS, "why_not": self._why_not, **changed}
        nodes = replace(self.first, rank=rank, **own)
        place = Place(nodes, nproc, self.restarts, steps=steps)
        self.places.append(place)
        return place

    def begin(self, hosts: int) -> list[Place]:
        """Start hosts, and wait until they are in the first generation together."""
        places = [self.come(rank) for rank in range(hosts)]
        wait_until(lambda: all(each.worlds for each in places))
        return places

    def begin_to_step(self, hosts: int) -> list[Place]:
        """Start hosts, and wait until all have completed a step."""
        places = self.begin(hosts)
        wait_until(lambda: have_stepped(*places))
        return places

    def end(self) -> None:
        """Let the ranks that remain complete."""
        for place in self.places:
            place.ending = DONE
        for place in self.places:
            place.thread.join(WAIT)
            assert not place.thread.is_alive()


def have_stepped(*places: Place) -> bool:
    """Whether every host has read that all of them have completed a step."""
    return all(
        host.stepped and host.standing is membership.Standing.MEMBER
        for place in places
        for host in place.rendezvous._seen.members
    )


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    for module, name, seconds in (
        (membership, "LAST_CALL", 0.3),
        (membership, "SECONDARY", 0.3),
        (rendezvous, "_GUIDING", 0.1),
        (rendezvous, "_POLL", 0.02),
        (rendezvous, "_RETRY", 0.02),
        (rendezvous, "_LINGER", 1.0),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(
        rendezvous, "say", lambda text: _said[threading.current_thread()].append(text)
    )
    jobs: list[Job] = []

    def make(nnodes: str, **options: Any) -> Job:
        jobs.append(Job(nnodes, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        for place in each.places:
            place.vanish()
    _said.clear()


def assert_worlds(place: Place, *expected: tuple[int, int]) -> None:
    """Check the place and the number of hosts in every generation, once there are as many."""
    wait_until(lambda: len(place.worlds) >= len(expected) or place.error)
    assert place.worlds == list(expected), place.error


# -- meeting ---------------------------------------------------------------------------------------


def test_a_host_joins_between_generations_and_that_is_no_restart(job: Callable[..., Job]) -> None:
    it = job("1:2", restarts=0)
    [first] = it.begin(1)
    first.steps = False
    second = it.come()
    wait_until(lambda: len(first.said) > 1 and second.said)
    assert first.said == [
        "hosts      1 host; rank 0 of 1 here",
        "hosts      host 1 (127.0.0.1) joins; finishing a step, to continue with 2 hosts",
    ]
    assert second.said[0] == "hosts      the other hosts finish a step, and continue with this host"
    assert first.verdicts == [], "ranks that have not made a step have nothing to save"
    first.steps = True
    assert_worlds(first, (0, 1), (0, 2))
    assert_worlds(second, (1, 2))
    assert [*first.numbers, *second.numbers] == [0, 1, 1]
    assert first.verdicts == [Verdict(Next.REGROUP, "continuing with 2 hosts")]
    for rank, host in enumerate((first, second)):
        assert host.said[-1] == f"hosts      2 hosts; rank {rank} of 2 here"
    it.end()
    assert [each.verdicts[-1] for each in (first, second)] == [OVER] * 2


def test_hosts_that_do_not_fit_are_told_and_disturb_nobody(job: Callable[..., Job]) -> None:
    it = job("1:3")
    first, second = it.begin(2)
    refused = [
        (it.come(nproc=2), "--nproc: found 2, expected 1, as host 0 has"),
        (it.come(options={"--lr": 0.2}), "--lr: found 0.2, expected 0.1, as host 0"),
        (it.come(count=4), "--nnodes: found 1:4, expected 1:3, as host 0 has"),
        (it.come(2), "the job cannot run over 3 hosts: --batch-tokens: found 64"),
    ]
    for place, why in refused:
        place.thread.join(WAIT)
        assert why in place.error
        assert place.exit_code == 2
        assert place.worlds == []
    assert_worlds(first, (0, 2))
    assert_worlds(second, (1, 2))
    assert not any("joins" in said for said in first.said)
    assert first.numbers == second.numbers == [0]


def test_hosts_of_a_fixed_job_answer_for_their_own_options(job: Callable[..., Job]) -> None:
    it = job("2")
    first, second = it.come(0), it.come(1, options={"--lr": 9})
    assert_worlds(first, (0, 2))
    assert_worlds(second, (1, 2))


def test_a_host_that_misses_a_whole_generation_takes_part_in_the_next(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("2", restarts=1)
    first, second = it.come(0), it.come(1)
    sleeps = threading.Event()
    wait, second_thread = Rendezvous._check, second.thread

    def check(self: Rendezvous) -> None:
        if threading.current_thread() is second_thread:
            sleeps.wait(WAIT)  # the ranks of host 0 fail meanwhile
        wait(self)

    monkeypatch.setattr(Rendezvous, "_check", check)
    first.ending = CRASHED
    wait_until(lambda: first.verdicts)
    sleeps.set()
    assert_worlds(first, (0, 2), (0, 2))
    wait_until(lambda: second.numbers and second.numbers[-1] == 1)


# -- leaving ---------------------------------------------------------------------------------------


def test_a_signal_ends_waiting_for_others(job: Callable[..., Job]) -> None:
    nobody = job("2").come(1)  # while nothing listens
    it = job("2")
    waiting = it.come(0)
    wait_until(lambda: waiting.rendezvous._seen.hosts)
    for place in (nobody, waiting):
        place.signal.set()
        place.thread.join(WAIT)
        assert place.error == "a signal asked to stop"


def test_the_host_that_serves_waits_no_longer_than_the_others_need(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER", 2 * WAIT)
    it = job("2")
    first, second = it.begin(2)
    it.end()
    assert [each.verdicts for each in (first, second)] == [[OVER], [OVER]]


# -- who is there ----------------------------------------------------------------------------------


def test_a_host_0_of_another_version_is_told_from_one_of_this() -> None:
    listener = listening("127.0.0.1")
    port = listener.getsockname()[1]
    with contextlib.closing(Registry(listener, b"", HostReport)) as registry:
        registry.publish({"hosts": []})
        with pytest.raises(UserError, match="another version of Shardwise; install the same"):
            start_alone(Nodes(2, 1, "127.0.0.1", port, timeout=10))


def start_alone(nodes: Nodes) -> None:
    mine = Rendezvous(nodes, 1, 0)
    try:
        mine.next_rendezvous()
    finally:
        mine.shutdown()


def test_a_host_without_host_0_is_told_where_it_looked() -> None:
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=f"host 0 cannot be reached at 127.0.0.1:{port} for 0 s"):
        start_alone(Nodes(2, 1, "127.0.0.1", port, timeout=0.01))
    with listening("127.0.0.1") as taken:
        nodes = Nodes(2, 0, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UserError, match="--rdzv: host 0 cannot listen at"):
            start_alone(nodes)


def test_a_host_with_another_token_is_told_so(job: Callable[..., Job]) -> None:
    it = job("1:2", token=b"the token of this job")
    [first] = it.begin(1)
    stranger = it.come(token=b"the token of another")
    stranger.thread.join(WAIT)
    assert stranger.error.startswith("--rdzv: store at 127.0.0.1:")
    assert "found another token" in stranger.error
    assert "--rdzv-token-file" in stranger.error
    assert_worlds(first, (0, 1))
    it.come()
    assert_worlds(first, (0, 1), (0, 2))


def test_a_silent_host_is_lost(job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE", SILENCE)
    monkeypatch.setattr(membership, "LAST_CALL", 2 * WAIT)  # all three are enough
    it = job("1:3", restarts=1, odd=0)
    first, second, third = it.begin(3)
    go_on = third.suspend()
    wait_until(lambda: first.verdicts and second.verdicts)
    for each in (first, second):
        assert each.verdicts[0].text.startswith(
            "host 2 (127.0.0.1) was lost: no sign of life for 4 s"
        )
    assert_worlds(first, (0, 3), (0, 2))
    go_on()
    third.thread.join(WAIT)
    assert "this host was suspended, and counts as lost" in third.error
    assert third.exit_code == 1
    assert not third.serves, "it never elects itself"


# -- losing the host that serves the rendezvous ----------------------------------------------------


def test_the_others_move_the_rendezvous_when_host_0_is_lost(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("1:3", restarts=2, token=b"the token of this job", odd=0)
    first, second, third = it.begin(3)
    monkeypatch.setattr(membership, "LAST_CALL", 2 * WAIT)  # all three are enough
    wait_until(lambda: have_stepped(first, second, third))
    first.vanish()
    assert_worlds(second, (1, 3), (0, 2))
    assert_worlds(third, (2, 3), (1, 2))
    for each in (second, third):
        assert each.verdicts == [
            Verdict(
                Next.RESTART,
                "host 0 (127.0.0.1) was lost: the connection was closed; continuing with 2 hosts",
            )
        ]
    assert second.serves
    assert not third.serves
    # A new host 0 at the old address, and one that knows that address only, are led there.
    wait_until(lambda: have_stepped(second, third))
    again = it.come(0)
    assert_worlds(second, (1, 3), (0, 2), (1, 3))
    assert_worlds(again, (0, 3))
    assert second.verdicts[-1].next is Next.REGROUP
    # It serves next, should that be needed.
    wait_until(lambda: have_stepped(second, third, again))
    second.vanish()
    assert_worlds(third, (2, 3), (1, 2), (2, 3), (1, 2))
    assert_worlds(again, (0, 3), (0, 2))
    assert again.serves
    wait_until(lambda: have_stepped(third, again))
    newcomer = it.come()
    assert_worlds(newcomer, (1, 3))
    assert_worlds(again, (0, 3), (0, 2), (0, 3))
    it.end()
    assert [each.verdicts[-1] for each in (third, again, newcomer)] == [OVER] * 3


@pytest.mark.parametrize("shown", ["while it waits", "before it has written anything"])
def test_a_newcomer_at_the_new_place_is_compared_with_the_job(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    it = job("1:3", restarts=1, odd=0)
    first, second = it.begin(2)
    monkeypatch.setattr(membership, "LAST_CALL", 2 * WAIT)  # it begins no job of its own
    wait_until(lambda: have_stepped(first, second))
    first.vanish()
    assert_worlds(second, (1, 2), (0, 1))
    if shown == "before it has written anything":
        decide = Rendezvous._decide

        def late(self: Rendezvous, state: JobState) -> None:
            assert self._client is not None
            if self.nodes.rank != 0 or self._client.store.check([rendezvous._MOVED]):
                decide(self, state)

        monkeypatch.setattr(Rendezvous, "_decide", late)
    again = it.come(0, options={"--lr": 0.2})
    again.thread.join(WAIT)
    assert "--lr: found 0.2, expected 0.1" in again.error
    assert again.worlds == []
    assert_worlds(second, (1, 2), (0, 1))


def test_host_0_leaves_in_order_and_the_others_continue_without_a_restart(
    job: Callable[..., Job],
) -> None:
    """Every host of a job may be replaced, one after the other."""
    it = job("1:3", restarts=0, odd=0)
    first, second = it.begin_to_step(2)
    third = it.come()
    assert_worlds(third, (2, 3))
    wait_until(lambda: have_stepped(first, second, third))
    second.ending = third.ending = SAVED
    first.ending = TERMINATED
    first.thread.join(WAIT)
    assert first.verdicts[-1].next is Next.LEAVE
    wait_until(lambda: second.serves)
    assert_worlds(second, (1, 2), (1, 3), (0, 2))
    assert_worlds(third, (2, 3), (1, 2))
    wait_until(lambda: have_stepped(second, third))
    third.ending, second.ending = SAVED, TERMINATED
    second.thread.join(WAIT)
    assert second.verdicts[-1].next is Next.LEAVE
    assert_worlds(third, (2, 3), (1, 2), (0, 1))
    wait_until(lambda: third.serves)
    it.end()
    assert third.verdicts[-1] == OVER


def test_the_next_candidate_is_dead_as_well(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("1:4", restarts=1, odd=0)
    first, second, third, fourth = it.begin(4)
    wait_until(lambda: have_stepped(third, fourth))
    second_dies = threading.Thread(target=second.vanish)
    second_dies.start()
    first.vanish()
    second_dies.join(WAIT)
    wait_until(lambda: third.serves)
    wait_until(lambda: third.numbers[-1] == fourth.numbers[-1] == 1 or third.error or fourth.error)
    assert third.worlds[-1] == (0, 2)
    assert fourth.worlds[-1] == (1, 2)
    assert "host 1 (127.0.0.1) was lost" in third.verdicts[0].text


def test_what_only_others_have_read_is_not_forgotten(job: Callable[..., Job]) -> None:
    it = job("1:4", restarts=1, odd=0)
    first, second, third = it.begin_to_step(3)
    for each in (first, second, third):
        each.steps = False
    mine, taken = second.rendezvous, list[bool]()
    read, decide_from = mine._read, mine._decide_from

    def read_late(seen: JobState) -> None:
        if taken:  # by then it decides
            read(seen)

    def take_over(state: JobState) -> None:
        taken.append(state.regrouping)
        decide_from(state)

    mine._read, mine._decide_from = read_late, take_over  # type: ignore[method-assign]
    fourth = it.come()
    wait_until(lambda: all(each.rendezvous._seen.regrouping for each in (third, fourth)))
    assert not second.rendezvous._seen.regrouping
    first.vanish()
    wait_until(lambda: taken or second.error)
    assert taken == [True], "it has learned that from host 2"
    assert_worlds(fourth, (2, 3))


def test_a_silent_host_0_needs_a_majority_of_the_others(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE", SILENCE)
    it = job("1:3", restarts=1, odd=0)
    first, second, third = it.begin_to_step(3)
    go_on = first.suspend()
    assert_worlds(second, (1, 3), (0, 2))
    assert_worlds(third, (2, 3), (1, 2))
    assert "host 0 (127.0.0.1) was lost: no sign of life for 4 s" in second.verdicts[0].text
    go_on()
    first.thread.join(WAIT)
    assert not first.thread.is_alive(), "two parts of the job continue"
    assert len(first.worlds) == 1
    # Of two hosts, neither knows which of them is cut off.
    small = job("1:2", restarts=1)
    first, second = small.begin(2)
    go_on = first.suspend()
    second.thread.join(WAIT)
    assert "was lost: no sign of life for 4 s; the job ends here" in second.error
    assert "--auto-resume" in second.error
    assert second.exit_code == 1
    go_on()


@pytest.mark.parametrize(
    ("closed", "silence", "refuses", "suspended", "loss"),
    [
        ("", 9.0, False, 0.0, None),
        ("", 11.0, True, 0.0, (HostLoss.SILENT, "no sign of life for 10 s")),
        ("", None, True, 0.0, (HostLoss.SILENT, "no sign of life for 10 s")),  # it said goodbye
        ("cut", None, True, 0.0, (HostLoss.DEAD, "cut")),
        ("cut", None, False, 0.0, (HostLoss.SILENT, "cut")),
        ("cut", None, True, 6.0, (HostLoss.SILENT, "cut")),  # the others may have continued
    ],
)
def test_a_host_is_dead_only_if_its_system_says_so_to_a_host_that_was_awake(
    monkeypatch: pytest.MonkeyPatch,
    closed: str,
    silence: float | None,
    refuses: bool,
    suspended: float,
    loss: tuple[HostLoss, str] | None,
) -> None:
    now = 0.0
    clock = Clock(lambda: now)
    place = Rendezvous(Nodes(2, 0, "127.0.0.1", 1), 1, 0, clock=clock)
    monkeypatch.setattr(rendezvous, "_refuses", lambda *_: refuses)
    state = JobState(hosts=[membership.Host("other", 1, "127.0.0.1")])
    heard = {} if silence is None else {"other": silence}
    presence = Presence[HostReport]({}, heard, {"other": closed} if closed else {})
    if not closed:
        assert place._losses(state, presence) == {}, "it may not have found the new place yet"
    for _ in range(24):
        now += 0.5
        place._losses(state, presence)
    now += suspended
    assert place._losses(state, presence).get("other") == loss


def test_a_host_that_was_suspended_does_not_take_over(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("1:2", restarts=1)
    first, second = it.begin_to_step(2)
    monkeypatch.setattr(rendezvous, "SILENCE", 1.0)
    go_on = second.suspend()
    time.sleep(0.1)
    first.vanish()
    time.sleep(1.0)
    go_on()
    second.thread.join(WAIT)
    assert "was lost" in second.error
    assert len(second.worlds) == 1
    assert not second.serves


def test_a_host_that_is_suspended_while_it_takes_over_does_not(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("1:3", restarts=1, odd=0)
    first, second, _ = it.begin_to_step(3)
    assert second.rendezvous._registry is not None
    store = second.rendezvous._registry.store
    values, counted = store.values, threading.Event()

    def count_and_hang(prefix: str) -> dict[str, bytes]:
        found = values(prefix)
        if found and prefix == rendezvous._VOTE:
            with second._clock._lock:
                counted.set()
                second._go_on.wait(WAIT)
        return found

    monkeypatch.setattr(store, "values", count_and_hang)
    first.vanish()
    assert counted.wait(WAIT)
    monkeypatch.setattr(rendezvous, "SILENCE", 1.0)
    time.sleep(0.6)  # more than a half of it
    second._go_on.set()
    second.thread.join(WAIT)
    assert "this host was suspended, and counts as lost" in second.error
    assert not second.serves


def test_without_a_restart_left_losing_host_0_ends_the_job(job: Callable[..., Job]) -> None:
    it = job("1:3", restarts=0, odd=0)
    first, second, third = it.begin_to_step(3)
    first.vanish()
    for each in (second, third):
        each.thread.join(WAIT)
        assert f"host 0 ({it.first.where}) was lost: the connection was closed" in each.error
        assert each.error.endswith("Start it again on all hosts with --auto-resume")
        assert each.exit_code == 1
