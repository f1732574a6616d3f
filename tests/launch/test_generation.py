"""Who may take part in a job over hosts, and what follows a generation: decisions, no sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.launch import generation
from shardwise.launch.generation import Admission, Generation, Host, Next
from shardwise.launch.hosts import UNNUMBERED, Nodes, Terms
from shardwise.launch.launcher import Result, StoppedBy
from shardwise.launch.network import Connection

HELLO = {"nnodes": "2", "nproc": 2, "versions": {"torch": "2.13"}, "options": {"--lr": 0.1}}
FIXED = Nodes(2, 0, "a", 1)
ELASTIC = Nodes(3, 0, "a", 1, least=1)
GRACE = 30.0


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(generation, "time", clock)
    return clock


def make_host(rank: int, peer: str = "") -> Host:
    host = Host(cast(Connection, SimpleNamespace(peer=peer or f"10.0.0.{rank}")))
    host.rank, host.hello = rank, HELLO
    return host


def begin(nodes: Nodes, count: int = 2) -> tuple[Generation, list[Host]]:
    hosts = [make_host(rank) for rank in range(count)]
    return Generation(hosts, nodes, GRACE), hosts


def end(running: Generation, host: Host, result: Result, by: StoppedBy = StoppedBy.NOTHING) -> None:
    running.note_end(host, result, by)


# -- admission -------------------------------------------------------------------------------------


def admission(nodes: Nodes = FIXED, **terms: Any) -> Admission:
    return Admission(nodes, Terms(HELLO["options"], **terms))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"nnodes": "3"}, "--nnodes: found 3, expected 2, as host 0 has"),
        ({"nproc": 1}, "--nproc: found 1, expected 2, as host 0 (10.0.0.0) has"),
        ({"versions": {"torch": "2.11"}}, "torch: found 2.11, expected 2.13, as host 0 (10.0.0.0)"),
        ({"options": {"--lr": 9}}, None),  # each host of a fixed job answers for its own options
    ],
)
def test_a_host_has_to_agree_with_those_that_are_present(
    changed: dict[str, object], why: str | None
) -> None:
    found = admission().refusal(make_host(1), {**HELLO, **changed}, [make_host(0)], -1)
    assert (found is None) if why is None else found is not None and found.startswith(why)


def test_hosts_of_an_elastic_job_agree_on_their_options() -> None:
    hello = {**HELLO, "nnodes": "1:3", "options": {"--lr": 0.2}}
    found = admission(ELASTIC).refusal(make_host(1), hello, [make_host(0)], 0)
    assert found == "--lr: found 0.2, expected 0.1, as host 0 has"


def test_a_rank_is_taken_once_and_a_place_is_kept_for_host_0() -> None:
    rules = admission()
    twin = rules.refusal(make_host(1), HELLO, [make_host(1, "10.0.0.9")], -1)
    assert twin is not None
    assert "--node-rank: found 1, which the host 10.0.0.9 has too" in twin
    assert rules.refusal(make_host(0), HELLO, [make_host(1)], -1) is None
    full = rules.refusal(make_host(2), HELLO, [make_host(1)], -1)
    assert full == "--nnodes: the job at a:1 has its 2 hosts already"


def test_a_fixed_job_that_has_started_takes_nobody_in() -> None:
    found = admission().refusal(make_host(1), HELLO, [make_host(0)], 0)
    assert found is not None
    assert found.startswith("--rdzv: the job at a:1 has started without this host")


def test_hosts_without_a_rank_get_the_first_that_is_free() -> None:
    rules = admission(ELASTIC)
    assert rules.number(UNNUMBERED, []) == 1, "0 is that of host 0, present or not"
    assert rules.number(UNNUMBERED, [make_host(1), make_host(3)]) == 2
    assert rules.number(7, [make_host(1)]) == 7


def test_a_host_that_failed_while_it_joined_rests(clock: Clock) -> None:
    rules = admission(ELASTIC)
    hello = {**HELLO, "nnodes": "1:3"}
    rules.note_failure(make_host(1))
    clock.now += generation.REST - 1
    found = rules.refusal(make_host(1), hello, [make_host(0)], 1)
    assert found is not None
    assert "failed 599 s ago" in found
    assert "try again in 1 s" in found
    clock.now += 1
    assert rules.refusal(make_host(1), hello, [make_host(0)], 1) is None


def test_as_many_hosts_take_part_as_the_job_can_run_over() -> None:
    rules = admission(ELASTIC, why_not=lambda hosts: "odd" if hosts == 3 else None)
    assert rules.most(5) == (2, "the job cannot run over 3 hosts: odd")
    assert rules.most(2) == (2, "")
    none = admission(ELASTIC, why_not=lambda hosts: "never")
    assert none.most(1) == (0, "the job cannot run over 1 host: never")
    assert admission().most(5) == (5, ""), "a fixed job takes those that agree"


# -- what follows ----------------------------------------------------------------------------------


def test_a_generation_ends_when_all_ranks_have_completed() -> None:
    running, hosts = begin(FIXED)
    assert running.decide(restarts=1) is None
    end(running, hosts[0], Result.COMPLETED)
    assert running.is_ending
    assert running.decide(restarts=1) is None
    end(running, hosts[1], Result.COMPLETED)
    decision = running.decide(restarts=1)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.END, "")


@pytest.mark.parametrize(
    ("result", "restarts", "follows"),
    [
        (Result.CRASHED, 1, Next.RESTART),
        (Result.CRASHED, 0, Next.FAIL),
        (Result.FAILED, 1, Next.FAIL),
    ],
)
def test_a_failure_restarts_the_job_if_that_may_help(
    result: Result, restarts: int, follows: Next
) -> None:
    running, hosts = begin(FIXED)
    end(running, hosts[1], result)
    decision = running.decide(restarts)
    assert decision is not None
    assert decision.next is follows
    assert decision.why == "a rank of host 1 (10.0.0.1) failed"


def test_the_host_that_failed_first_is_waited_for(clock: Clock) -> None:
    running, hosts = begin(FIXED)
    end(running, hosts[0], Result.SECONDARY)
    assert running.decide(1) is None, "it says that another was first"
    clock.now += 1
    end(running, hosts[1], Result.FAILED)
    decision = running.decide(1)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.FAIL, "a rank of host 1 (10.0.0.1) failed")


def test_a_secondary_failure_counts_if_no_other_comes(clock: Clock) -> None:
    running, hosts = begin(FIXED)
    end(running, hosts[0], Result.SECONDARY)
    assert running.decide(1) is None
    clock.now += 3.5
    decision = running.decide(1)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.RESTART, "a rank of host 0 (10.0.0.0) failed")


def test_a_lost_host_is_named_and_one_that_had_ended_well_is_no_loss() -> None:
    running, hosts = begin(FIXED)
    lost = hosts.pop()
    lost.why_lost = "no sign of life for 10 s"
    running.note_lost(lost)
    decision = running.decide(1)
    assert decision is not None
    assert decision.why == "host 1 (10.0.0.1) was lost: no sign of life for 10 s"
    running, hosts = begin(FIXED)
    end(running, hosts[1], Result.COMPLETED)
    running.note_lost(hosts.pop())
    assert running.decide(1) is None
    end(running, hosts[0], Result.COMPLETED)
    decision = running.decide(1)
    assert decision is not None
    assert decision.next is Next.END


def test_a_signal_stops_a_fixed_job_after_the_grace_at_the_latest(clock: Clock) -> None:
    running, hosts = begin(FIXED)
    hosts[0].heard = clock.now
    end(running, hosts[0], Result.COMPLETED, StoppedBy.LAUNCHER)
    assert running.decide(1) is None, "the other host saves"
    clock.now += GRACE
    decision = running.decide(1)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.FAIL, "host 0 (10.0.0.0) was stopped")


@pytest.mark.parametrize("result", [Result.COMPLETED, Result.SECONDARY])
def test_a_host_of_an_elastic_job_leaves_when_the_others_have_saved(result: Result) -> None:
    running, hosts = begin(ELASTIC)
    for host in hosts:
        running.note_step(host)
    end(running, hosts[1], Result.COMPLETED, StoppedBy.LAUNCHER)
    assert running.decide(0) is None
    end(running, hosts[0], result, StoppedBy.RANK)
    decision = running.decide(0)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.REGROUP, "host 1 (10.0.0.1) left")
    assert [host for host, _ in decision.leaving] == [hosts[1]]


def test_a_signal_to_host_0_stops_an_elastic_job() -> None:
    running, hosts = begin(ELASTIC)
    end(running, hosts[0], Result.COMPLETED, StoppedBy.LAUNCHER)
    end(running, hosts[1], Result.COMPLETED, StoppedBy.RANK)
    decision = running.decide(1)
    assert decision is not None
    assert decision.next is Next.END


@pytest.mark.parametrize("lost", [False, True])
def test_hosts_on_probation_are_expelled_if_they_fail(lost: bool) -> None:
    running, hosts = begin(ELASTIC, 3)
    joined = hosts[2]
    joined.on_probation = True
    if lost:
        running.note_lost(hosts.pop())
    else:
        end(running, joined, Result.CRASHED)
    decision = running.decide(restarts=0)
    assert decision is not None
    assert decision.next is Next.EXPEL, "that costs no restart"
    assert [host for host, _ in decision.leaving] == [joined]


def test_probation_ends_when_every_host_has_completed_a_step() -> None:
    running, hosts = begin(ELASTIC)
    hosts[1].on_probation = True
    running.note_step(hosts[1])
    assert hosts[1].on_probation
    running.note_step(hosts[0])
    assert not hosts[1].on_probation
    end(running, hosts[1], Result.CRASHED)
    decision = running.decide(restarts=0)
    assert decision is not None
    assert decision.next is Next.FAIL


def test_regrouping_waits_for_all_to_save_but_not_forever(clock: Clock) -> None:
    running, hosts = begin(ELASTIC)
    running.regrouping = True
    hosts[0].heard = clock.now
    end(running, hosts[0], Result.COMPLETED, StoppedBy.RANK)
    assert running.decide(0) is None
    clock.now += GRACE + 1
    decision = running.decide(0)
    assert decision is not None
    assert (decision.next, decision.why) == (Next.REGROUP, "")


@pytest.mark.parametrize("follows", list(Next))
def test_every_decision_has_a_label_that_fits_its_column(follows: Next) -> None:
    assert 0 < len(follows.label) < 11
    assert not (follows.begins_again and follows.label == "error:")
