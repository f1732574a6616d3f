"""Rendezvous server and clients; threads stand for launchers and their ranks."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardwise.launch import generation, rendezvous
from shardwise.launch.errors import UserError
from shardwise.launch.generation import Next
from shardwise.launch.hosts import UNNUMBERED, Nodes, Share, Terms
from shardwise.launch.launcher import Order, Outcome, Result, StoppedBy
from shardwise.launch.network import listening
from shardwise.launch.rendezvous import LostError, RendezvousClient, RendezvousServer, Verdict

WAIT = 30.0  # seconds that anything may take on a busy machine
OPTIONS = {"--lr": 0.1}
SAVED = Outcome(128 + 15, stopped_by=StoppedBy.RANK)
DONE = Outcome(0)
FAILED = Outcome(1, Result.FAILED)
SECONDARY = Outcome(1, Result.SECONDARY)
SIGNALLED = Outcome(128 + 15, stopped_by=StoppedBy.LAUNCHER)
OVER = Verdict(Next.END, "", "hosts")


class Place:
    """A host whose ranks train until they are asked to save, or the test ends them."""

    def __init__(
        self, nodes: Nodes, nproc: int, options: dict[str, object], *, steps: bool
    ) -> None:
        self.nodes, self.nproc, self.options = nodes, nproc, options
        self.steps = steps  # whether its ranks complete a step
        self.said: list[str] = []
        self.shares: list[Share] = []
        self.verdicts: list[Verdict] = []
        self.error = ""
        self.ending: Outcome | None = None
        self.gone = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        client = RendezvousClient(self.nodes, self.nproc, self.options, self.said.append)
        try:
            while share := client.begin(1, self.gone.is_set):
                self.shares.append(share)
                verdict = self._train(client)
                if verdict is not None:
                    self.verdicts.append(verdict)
                if verdict is None or not verdict.next.begins_again:
                    break
        except UserError as error:
            self.error = str(error)
        client.close()

    def _train(self, client: RendezvousClient) -> Verdict | None:
        """Run one generation; None if this host vanishes."""
        ending = None
        while ending is None and (order := client.order()) is not Order.ABORT:
            time.sleep(0.005)
            if self.gone.is_set():
                return None
            if self.steps:
                client.report_training()
            if self.ending is not None:  # or the test might set it before it is cleared
                ending, self.ending = self.ending, None
            if order is Order.SAVE_AND_STOP and self.steps:
                ending = ending or SAVED
        return client.end(ending or FAILED, self.gone.is_set)

    def vanish(self) -> None:
        """End as a launcher that is killed."""
        self.gone.set()
        self.thread.join()


class Job:
    """A server at a free port of this machine, and the hosts that come."""

    def __init__(self, nnodes: str, *, restarts: int = 0, timeout: float = WAIT) -> None:
        with listening("127.0.0.1") as free:
            where = f"127.0.0.1:{free.getsockname()[1]}"
        first = Nodes.of(nnodes, 0, where, timeout)
        assert first is not None
        self.first = first
        self.server = RendezvousServer(first, restarts, Terms(OPTIONS, self._why_not))
        self.server.start()
        self.places: list[Place] = []

    def _why_not(self, hosts: int) -> str | None:
        return "--batch-tokens: found 64" if hosts == 3 else None

    def come(
        self, rank: int = UNNUMBERED, *, nproc: int = 1, steps: bool = True, **changed: Any
    ) -> Place:
        """Start a host."""
        options = changed.pop("options", OPTIONS)
        place = Place(replace(self.first, rank=rank, **changed), nproc, options, steps=steps)
        self.places.append(place)
        return place

    def begin(self, hosts: int) -> list[Place]:
        """Start hosts, and wait until they are in the first generation together."""
        places = [self.come(rank) for rank in range(hosts)]
        wait_for(lambda: all(each.shares for each in places))
        return places

    def waits_for_a_step(self) -> bool:
        """Whether a host has not reported a completed step yet."""
        return not all(host.training for host in self.server._hosts)

    def end(self) -> None:
        """Let the ranks that remain complete."""
        for place in self.places:
            place.ending = DONE
        for place in self.places:
            place.thread.join(WAIT)
            assert not place.thread.is_alive()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    for module, name, seconds in (
        (rendezvous, "LAST_CALL", 0.3),
        (rendezvous, "_POLL", 0.01),
        (generation, "_SECONDARY", 0.3),
    ):
        monkeypatch.setattr(module, name, seconds)
    jobs: list[Job] = []

    def make(nnodes: str, **options: Any) -> Job:
        jobs.append(Job(nnodes, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        for place in each.places:
            place.vanish()
        each.server.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.005)


def assert_worlds(place: Place, *expected: tuple[int, int]) -> None:
    """Check first rank and world size of every generation, once there are as many."""
    wait_for(lambda: len(place.shares) >= len(expected))
    assert [(share.first, share.world_size) for share in place.shares] == list(expected)


def test_a_job_begins_with_all_at_once_and_with_fewer_after_a_while(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LAST_CALL", 2 * WAIT)
    for rank, place in enumerate(job("1:2").begin(2)):
        assert_worlds(place, (rank, 2))
    monkeypatch.setattr(rendezvous, "LAST_CALL", 0.1)
    for rank, place in enumerate(job("2:4").begin(2)):
        assert_worlds(place, (rank, 2))
    alone = job("2:4", timeout=0.5).come(0)
    alone.thread.join(WAIT)
    assert "found hosts [0] within 0 s, expected 2 of them or more" in alone.error


def test_a_host_joins_between_generations_and_that_is_no_restart(job: Callable[..., Job]) -> None:
    it = job("1:2", restarts=0)
    [first] = it.begin(1)
    first.steps = False
    second = it.come()
    wait_for(lambda: first.said and second.said)
    assert "host 1 (127.0.0.1) joins; saving, to continue with 2 hosts" in first.said
    assert second.said == ["the other hosts save first, and continue with this host"]
    assert first.verdicts == [], "ranks that have not made a step have nothing to save"
    first.steps = True
    assert_worlds(first, (0, 1), (0, 2))
    assert_worlds(second, (1, 2))
    assert [share.generation for share in (*first.shares, *second.shares)] == [0, 1, 1]
    assert first.verdicts == [Verdict(Next.REGROUP, "continuing with 2 hosts", "hosts")]
    it.end()
    assert [each.verdicts[-1] for each in (first, second)] == [OVER] * 2


def test_hosts_that_do_not_fit_are_told_and_disturb_nobody(job: Callable[..., Job]) -> None:
    it = job("1:3")
    first, second = it.begin(2)
    refused = [
        (it.come(nproc=2), "--nproc: found 2, expected 1, as host 0 (127.0.0.1) has"),
        (it.come(options={"--lr": 0.2}), "--lr: found 0.2, expected 0.1, as host 0"),
        (it.come(options={**OPTIONS, "--mesh": "x"}), "--mesh: found x, expected None, as host 0"),
        (it.come(count=4), "--nnodes: found 1:4, expected 1:3, as host 0 has"),
        (
            it.come(1),
            "--node-rank: found 1, which the host 127.0.0.1 has too; expected a different",
        ),
        (it.come(2), "the job cannot run over 3 hosts: --batch-tokens: found 64"),
    ]
    for place, why in refused:
        place.thread.join(WAIT)
        assert why in place.error
        assert place.shares == []
    assert_worlds(first, (0, 2))
    assert_worlds(second, (1, 2))
    assert not any("joins" in said for said in first.said)
    second.vanish()
    wait_for(lambda: first.verdicts)
    assert it.come().thread.join(WAIT) is None
    assert "ended before this host could join it" in it.places[-1].error


def test_two_at_once_join_together_where_one_would_not_fit(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = job("1:4", restarts=1)
    first, second = it.begin(2)
    monkeypatch.setattr(rendezvous, "LAST_CALL", 2 * WAIT)  # all four are enough
    others = [it.come(), it.come()]
    wait_for(lambda: all(each.shares for each in others))
    assert sorted(each.shares[0].first for each in others) == [2, 3]
    assert_worlds(first, (0, 2), (0, 4))
    late = it.come()
    late.thread.join(WAIT)
    assert "has its 4 hosts already" in late.error
    # If one is lost, and the job cannot run over the three that remain, it continues with two.
    wait_for(lambda: not it.waits_for_a_step())
    others[0].vanish()
    others[1].thread.join(WAIT)
    assert "the job cannot run over 3 hosts: --batch-tokens: found 64" in others[1].error
    assert_worlds(second, (1, 2), (1, 4), (1, 2))
    assert "was lost: the connection was closed; continuing with 2 hosts" in (
        second.verdicts[-1].text
    )


def test_a_joining_host_that_vanishes_while_it_waits_costs_nothing(job: Callable[..., Job]) -> None:
    it = job("1:2")
    [first] = it.begin(1)
    first.steps = False
    second = it.come()
    wait_for(lambda: first.said)
    second.vanish()
    first.steps = True
    assert_worlds(first, (0, 1), (0, 1))
    it.end()
    assert first.verdicts[-1] == OVER


def test_what_fails_while_hosts_join_is_blamed_on_them_and_costs_no_restart(
    job: Callable[..., Job],
) -> None:
    it = job("1:2", restarts=0)
    [first] = it.begin(1)
    rounds = [(0, 1)]
    for how in ("killed", "failed"):
        second = it.come(steps=False)
        wait_for(lambda guest=second: guest.shares)
        if how == "killed":
            second.vanish()
        else:
            second.ending = FAILED
        rounds += [(0, 2), (0, 1)]
        assert_worlds(first, *rounds)
        assert first.verdicts[-1].text.endswith("; continuing with 1 host")
    second.thread.join(WAIT)
    text = "this host failed while it joined; the job continues without it"
    assert second.verdicts == [Verdict(Next.LEAVE, text, "restart")]
    again = it.come()
    again.thread.join(WAIT)
    assert "this host failed 0 s ago while it joined" in again.error
    assert len(first.shares) == 5


def test_a_host_that_has_made_a_step_is_one_like_the_others(job: Callable[..., Job]) -> None:
    it = job("1:2", restarts=1)
    [first] = it.begin(1)
    for rounds, follows in ((2, Next.RESTART), (4, Next.FAIL)):
        wait_for(lambda rounds=rounds: len(first.shares) == rounds - 1)
        second = it.come()
        wait_for(lambda rounds=rounds: len(first.shares) == rounds)
        wait_for(lambda: not it.waits_for_a_step())
        second.vanish()
        wait_for(lambda rounds=rounds: len(first.verdicts) == rounds)
        assert first.verdicts[-1].next is follows
        assert "host 1 (127.0.0.1) was lost" in first.verdicts[-1].text


def test_below_the_least_the_job_waits_for_another(job: Callable[..., Job]) -> None:
    it = job("2:2", restarts=1)
    first, second = it.begin(2)
    second.vanish()
    wait_for(lambda: first.verdicts)
    assert first.verdicts[0].text.endswith("waiting for more hosts than 1")
    assert len(first.shares) == 1
    third = it.come(1)
    assert_worlds(first, (0, 2), (0, 2))
    assert_worlds(third, (1, 2))


@pytest.mark.parametrize("how", [SAVED, SECONDARY])
def test_a_host_that_a_signal_stops_leaves_and_costs_no_restart(
    job: Callable[..., Job], how: Outcome
) -> None:
    it = job("1:2", restarts=0)
    first, second = it.begin(2)
    wait_for(lambda: not it.waits_for_a_step())
    second.ending = SIGNALLED
    first.ending = how
    second.thread.join(WAIT)
    text = "this host leaves; the job continues without it"
    assert second.verdicts == [Verdict(Next.LEAVE, text, "hosts")]
    assert_worlds(first, (0, 2), (0, 1))
    text = "host 1 (127.0.0.1) left; continuing with 1 host"
    assert first.verdicts == [Verdict(Next.REGROUP, text, "hosts")]


def test_a_host_that_leaves_before_a_step_is_not_waited_for(job: Callable[..., Job]) -> None:
    it = job("1:2", restarts=0)
    [first] = it.begin(1)
    second = it.come(steps=False)
    wait_for(lambda: second.shares)
    second.ending = SIGNALLED
    assert_worlds(first, (0, 1), (0, 2), (0, 1))


def test_a_signal_on_all_hosts_stops_the_job(job: Callable[..., Job]) -> None:
    it = job("1:2", restarts=1)
    places = it.begin(2)
    wait_for(lambda: not it.waits_for_a_step())
    for place in reversed(places):
        place.ending = SIGNALLED
    wait_for(lambda: all(place.verdicts for place in places))
    assert [place.verdicts for place in places] == [[OVER], [OVER]]


def test_ctrl_c_while_hosts_join_stops_the_job(job: Callable[..., Job]) -> None:
    it = job("1:2")
    [first] = it.begin(1)
    first.steps = False
    second = it.come()
    wait_for(lambda: first.said)
    first.ending = SIGNALLED
    wait_for(lambda: first.verdicts)
    assert first.verdicts == [OVER]
    second.thread.join(WAIT)
    assert "ended before this host could join it" in second.error


@pytest.mark.parametrize("nnodes", ["0:2", "3:2", "1:", ":2", "a:b", "1:2:3", "-1:2", "1.5", ""])
def test_numbers_of_hosts_that_are_none_are_refused(nnodes: str) -> None:
    with pytest.raises(UserError, match=f"--nnodes: found {nnodes}, expected 1 or more, or MIN:MA"):
        Nodes.of(nnodes, 0, "a:1", 1.0)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what arrived is not a message of this protocol"),
        (b"", "the connection was closed"),
    ],
)
def test_another_program_at_the_port_is_told_from_a_host_that_was_lost(
    answer: bytes, why: str
) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1024):
                pass

    with listening("127.0.0.1") as listener:
        nodes = Nodes(2, 1, "127.0.0.1", listener.getsockname()[1], timeout=10)
        thread = threading.Thread(target=serve)
        thread.start()
        client = RendezvousClient(nodes, 1)
        with pytest.raises(UserError, match=r"--rdzv: what listens at 127\.0\.0\.1:") as raised:
            client.begin(0, lambda: False)
        client.close()
        thread.join()
    assert raised.value.exit_code == 2
    assert why in str(raised.value)


def test_a_host_that_is_parted_with_learns_why_though_the_server_hangs_up() -> None:
    """Its ranks may still run, and are killed first: the verdict is there before the end."""
    text = "this host failed while it joined; the job continues without it"
    messages = [
        {"kind": "start", "first": 1, "world_size": 2, "port": 5, "generation": 1},
        {"kind": "verdict", "next": "leave", "text": text, "label": "restart"},
    ]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            for message in messages:
                connection.sendall(json.dumps(message).encode() + b"\n")
                training.wait(WAIT)

    training = threading.Event()
    with listening("127.0.0.1") as listener:
        nodes = Nodes(2, 1, "127.0.0.1", listener.getsockname()[1], timeout=10)
        thread = threading.Thread(target=serve)
        thread.start()
        client = RendezvousClient(nodes, 1)
        share = client.begin(0, lambda: False)
        assert share is not None
        assert (share.first, share.world_size, share.port, share.generation) == (1, 2, 5, 1)
        training.set()
        wait_for(lambda: client.order() is Order.ABORT)
        thread.join()
        assert client.end(FAILED, lambda: False) == Verdict(Next.LEAVE, text, "restart")
        client.close()


def test_a_client_that_waits_for_others_stops_on_a_signal() -> None:
    with listening("127.0.0.1") as listener:
        nodes = Nodes(2, 1, "127.0.0.1", listener.getsockname()[1], timeout=10)
        client = RendezvousClient(nodes, 1)
        assert client.begin(0, lambda: True) is None
        assert client.end(DONE, lambda: True) == Verdict(Next.END, "")
        client.close()


def test_a_host_without_host_0_is_told_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening("127.0.0.1") as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=f"host 0 cannot be reached at 127.0.0.1:{port} for 0 s"):
        RendezvousClient(Nodes(2, 1, "127.0.0.1", port, timeout=0.01), 1)
    with listening("127.0.0.1") as taken:
        nodes = Nodes(2, 0, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(UserError, match="--rdzv: host 0 cannot listen at"):
            RendezvousServer(nodes, 0)


def test_a_silent_host_0_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SILENCE", 0.1)
    monkeypatch.setattr(rendezvous, "BEAT", 0.02)
    with listening("127.0.0.1") as listener:
        nodes = Nodes(2, 1, "127.0.0.1", listener.getsockname()[1], timeout=10)
        client = RendezvousClient(nodes, 1)
        with pytest.raises(LostError, match="was lost: no sign of life") as raised:
            client.begin(0, lambda: False)
        assert raised.value.exit_code == 1
        client.close()
