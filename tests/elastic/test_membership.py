"""Who may take part in a job over hosts, and what follows a generation: decisions, no sockets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from shardwise.base import plain
from shardwise.elastic import membership
from shardwise.elastic.clock import Timers
from shardwise.elastic.hosts import UNNUMBERED, Nodes
from shardwise.elastic.membership import (
    Host,
    HostLoss,
    HostReport,
    JobState,
    Next,
    Standing,
    Verdict,
)
from shardwise.elastic.outcome import STOP_GRACE, Outcome, Result, StoppedBy

FIXED = Nodes(2, 0, "a", 1)
ELASTIC = Nodes(3, 0, "a", 1, least=1)
SEEDS = 15  # orders of events; faults of the rules showed within the first ten


class Clock:
    """Time that passes when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(membership, "time", clock)
    return clock


def make_host(number: int, address: str = "") -> Host:
    return Host(f"id{number}", number, address or f"10.0.0.{number}")


Losses = dict[str, tuple[HostLoss, str]]


class Job:
    """A state, what hosts report, and the rules and timers of the host that decides."""

    def __init__(
        self,
        nodes: Nodes,
        clock: Clock,
        *,
        restarts: int = 0,
        why_not: Callable[[int], str | None] = lambda hosts: None,
    ) -> None:
        self.nodes, self.clock = replace(nodes, why_not=why_not), clock
        self.timers = Timers(clock.monotonic)
        self.state = JobState(restarts=restarts)
        self.reports: dict[str, HostReport] = {}
        self.losses: Losses = {}

    def admit(self, host: Host) -> str | None:
        """Let a host take part, and return why it may not."""
        self.state._admit(host.id, HostReport(host.number, host.address), self.nodes)
        refused = self.state.parted.get(host.id)
        if refused is None:
            self.reports[host.id] = HostReport(host.number, host.address)
        return None if refused is None else refused.text

    def of(self, host: Host) -> Host:
        """Return what is known of a host now."""
        found = self.state.host(host.id)
        assert found is not None
        return found

    def tell(self, host: Host, **changes: object) -> None:
        """Let a host report something; it is seen once others have reported as well."""
        self.reports[host.id] = replace(self.reports[host.id], **changes)  # type: ignore[arg-type]

    def ready(self, *hosts: Host) -> None:
        for host in hosts:
            self.tell(host, awaits=self.state.generation, store_port=1)

    def begin(self, count: int) -> list[Host]:
        """Start the first generation with ``count`` hosts."""
        hosts = [make_host(number) for number in range(count)]
        for host in hosts:
            assert self.admit(host) is None
        self.ready(*hosts)
        self.advance()
        self.clock.now += membership.LAST_CALL + 1
        self.advance()
        assert self.state.is_running
        return [self.of(host) for host in hosts]

    def advance(self) -> Verdict | None:
        self.state.look(self.reports, self.losses, self.nodes, self.timers)
        here = {host.id for host in self.state.hosts}
        self.reports = {id_: each for id_, each in self.reports.items() if id_ in here}
        return self.state.verdict

    def decide(self) -> Verdict:
        """Advance to what follows this generation."""
        verdict = self.advance()
        assert verdict is not None
        return verdict

    def come(self, number: int) -> Host:
        """Let a host come, and wait until no other may."""
        host = make_host(number)
        assert self.admit(host) is None
        self.ready(host)
        self.advance()
        self.clock.now += membership.LAST_CALL + 1
        self.advance()
        return host

    def step(self, *hosts: Host) -> None:
        for host in hosts:
            self.tell(host, stepped=self.state.generation)

    def end(self, host: Host, result: Result, by: StoppedBy = StoppedBy.NOTHING) -> None:
        self.tell(host, ended=self.state.generation, result=result, stopped_by=by)

    def lose(self, host: Host, loss: HostLoss = HostLoss.DEAD) -> None:
        self.losses[host.id] = loss, "no sign of life for 10 s"

    def join(self, number: int) -> Host:
        """Let a host join the generation that runs, and start another with it."""
        host = self.come(number)
        assert self.state.regrouping
        before = list(self.state.members)
        for each in before:
            self.end(each, Result.COMPLETED, StoppedBy.RANK)
        assert self.advance() is not None
        self.ready(*before)
        assert self.advance() is None
        return self.of(host)


# -- admission -------------------------------------------------------------------------------------


def test_a_number_is_taken_once_and_a_place_is_kept_for_host_0(clock: Clock) -> None:
    job = Job(FIXED, clock)
    assert job.admit(make_host(1)) is None
    twin = job.admit(Host("twin", 1, "10.0.0.9"))
    assert twin == (
        "--node-rank: found 1, which the host 10.0.0.1 has too; expected a different one for every "
        "host"
    )
    assert job.admit(make_host(2)) == "--nnodes: the job at a:1 has its 2 hosts already"
    assert job.admit(make_host(0)) is None


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"--nproc": 2, "--lr": 0.1}, "--nproc: found 2, expected 1, as host 0 has"),
        ({"--nproc": 1, "--lr": 0.2}, "--lr: found 0.2, expected 0.1, as host 0 has"),
        ({"--nproc": 1}, "--lr: found None, expected 0.1, as host 0 has"),
        ({"--nproc": 1, "--lr": 0.1, "--mesh": "x"}, "--mesh: found x, expected None, as host 0"),
    ],
)
def test_hosts_have_to_agree_with_host_0(clock: Clock, terms: dict[str, object], why: str) -> None:
    job = Job(ELASTIC, clock)
    job.state.terms = {"--nproc": 1, "--lr": 0.1}
    reports = {"other": HostReport(1, "10.0.0.1", terms=terms)}
    job.state.look(reports, {}, job.nodes, job.timers)
    assert job.state.hosts == []
    assert job.state.parted["other"].text.startswith(why)


def test_a_fixed_job_that_has_started_takes_nobody_in(clock: Clock) -> None:
    job = Job(FIXED, clock)
    job.begin(2)
    found = job.admit(Host("late", 1, "10.0.0.9"))
    assert found is not None
    assert found.startswith("--rdzv: the job at a:1 has started without this host")


def test_a_job_that_is_over_takes_nobody_in(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    [only] = job.begin(1)
    job.end(only, Result.FAILED)
    job.advance()
    found = job.admit(make_host(1))
    assert found == "--rdzv: the job at a:1 ended before this host could join it"


def test_a_host_0_that_comes_later_counts_like_any_other(clock: Clock) -> None:
    job = Job(Nodes(2, 0, "a", 1, least=1), clock, restarts=1)
    first, second = job.begin(2)
    job.lose(first)
    job.advance()
    job.ready(second)
    job.advance()
    job.join(2)
    found = job.admit(Host("again", 0, "10.0.0.0"))
    assert found == "--nnodes: the job at a:1 has its 2 hosts already"


def test_hosts_without_a_number_get_the_first_that_is_free(clock: Clock) -> None:
    job = Job(Nodes(5, 0, "a", 1, least=1), clock)
    numbers = []
    for name, number in (("a", UNNUMBERED), ("b", 3), ("c", UNNUMBERED), ("d", UNNUMBERED)):
        host = Host(name, number, "b")
        assert job.admit(host) is None
        numbers.append(job.of(host).number)
    assert numbers == [1, 3, 2, 4], "0 is that of host 0, present or not"


def test_a_host_that_failed_while_it_joined_rests(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    job.begin(1)
    joined = job.join(1)
    job.end(joined, Result.CRASHED)
    assert job.decide().next is Next.EXPEL
    clock.now += membership.REST - 1
    found = job.admit(Host("again", 1, joined.address))
    assert found is not None
    assert "failed 599 s ago" in found
    assert "try again in 1 s" in found
    clock.now += 1
    assert job.admit(Host("once more", 1, joined.address)) is None


def test_a_host_rests_for_a_while_whatever_its_clock_shows(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    job.begin(1)
    job.state.failed |= {"b": clock.now + 300, "c": clock.now + 10_000}
    assert job.admit(Host("other", 2, "c")) is None, "a clock was set, or is far off"
    found = job.admit(Host("again", 1, "b"))
    assert found is not None
    assert "failed 0 s ago" in found
    assert "try again in 600 s" in found


def test_as_many_hosts_take_part_as_the_job_can_run_over() -> None:
    nodes = replace(ELASTIC, why_not=lambda hosts: "odd" if hosts == 3 else None)
    assert nodes.most(5) == (2, "the job cannot run over 3 hosts: odd")
    assert nodes.most(2) == (2, "")
    none = replace(ELASTIC, why_not=lambda hosts: "never")
    assert none.most(1) == (0, "the job cannot run over 1 host: never")
    assert FIXED.most(5) == (5, ""), "a fixed job takes those that agree"


# -- gathering -------------------------------------------------------------------------------------


def test_a_fixed_job_waits_for_all_its_hosts_and_no_longer_than_its_limit(clock: Clock) -> None:
    job = Job(replace(FIXED, timeout=60.0), clock)
    only = make_host(0)
    assert job.admit(only) is None
    job.ready(only)
    job.advance()
    clock.now += 60
    job.advance()
    assert not job.state.is_over
    clock.now += 1
    verdict = job.advance()
    assert job.state.is_over
    assert verdict == Verdict(
        Next.REFUSE,
        "--rdzv: found hosts [0] within 60 s, expected [1] too; is the command running there?",
    )


def test_an_elastic_job_starts_with_fewer_hosts_when_no_more_come(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    for number in range(2):
        host = make_host(number)
        assert job.admit(host) is None
        job.ready(host)
        job.advance()
        clock.now += membership.LAST_CALL - 1
        job.advance()
        assert not job.state.is_running, "another host may come"
    clock.now += 2
    job.advance()
    assert [host.number for host in job.state.members] == [0, 1]
    assert job.state.notices == ["host 0 (10.0.0.0) is here", "host 1 (10.0.0.1) is here"]


def test_host_0_starts_a_job_and_a_later_generation_needs_none(clock: Clock) -> None:
    job = Job(Nodes(2, 0, "a", 1, least=1), clock, restarts=1)
    second = job.come(1)
    assert not job.state.is_running
    first = make_host(0)
    assert job.admit(first) is None
    job.ready(first)
    job.advance()
    assert job.state.is_running
    job.lose(first)
    job.advance()
    job.ready(second)
    job.advance()
    assert [host.number for host in job.state.members] == [1]


def test_below_the_least_the_job_waits_for_another_and_gives_up_in_time(clock: Clock) -> None:
    job = Job(Nodes(2, 0, "a", 1, timeout=60.0, least=2), clock, restarts=1)
    first, second = job.begin(2)
    job.lose(second)
    verdict = job.decide()
    assert verdict.text.endswith("waiting for more hosts than 1")
    job.ready(first)
    for _ in range(2):
        assert job.advance() is verdict
        clock.now += 60
    clock.now += 1
    assert job.decide().next is Next.REFUSE


def test_ready_for_an_earlier_generation_is_not_ready(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    for host in hosts:
        job.end(host, Result.CRASHED)
    assert job.decide().next is Next.RESTART
    for host in hosts:
        assert job.reports[host.id].awaits == -1
    job.advance()
    assert not job.state.is_running, "the stores for ranks that were at these ports are gone"
    job.ready(*hosts)
    job.advance()
    assert job.state.is_running


def test_the_hosts_that_were_there_stay_if_not_all_fit(clock: Clock) -> None:
    nodes = Nodes(4, 0, "a", 1, least=1)
    job = Job(nodes, clock, why_not=lambda hosts: "odd" if hosts == 3 else None)
    job.begin(2)
    third = job.come(2)
    assert not job.state.regrouping
    assert job.state.parted[third.id].text == "the job cannot run over 3 hosts: odd"
    assert job.state.generation == 0
    assert job.state.is_running


def test_two_at_once_join_together_where_one_would_not_fit(clock: Clock) -> None:
    nodes = Nodes(4, 0, "a", 1, least=1)
    job = Job(nodes, clock, why_not=lambda hosts: "odd" if hosts == 3 else None)
    job.begin(2)
    for number in (2, 3):
        assert job.admit(make_host(number)) is None
        job.advance()
    assert not job.state.regrouping, "their ranks are not ready"
    job.ready(make_host(2), make_host(3))
    job.advance()
    assert job.state.regrouping, "all four are enough"
    assert job.state.notices[-1] == (
        "host 2 (10.0.0.2) and host 3 (10.0.0.3) join; finishing a step, to continue with 4 hosts"
    )


def test_after_a_loss_as_many_continue_as_fit_and_those_with_low_numbers_stay(
    clock: Clock,
) -> None:
    nodes = Nodes(4, 0, "a", 1, least=1)
    job = Job(nodes, clock, restarts=1, why_not=lambda hosts: "odd" if hosts == 3 else None)
    first, second, third, fourth = job.begin(4)
    job.lose(second)
    assert job.decide().text.endswith("no sign of life for 10 s; continuing with 2 hosts")
    job.ready(first, third, fourth)
    assert job.advance() is None
    assert job.state.members == [first, third]
    refused = Verdict(Next.REFUSE, "the job cannot run over 3 hosts: odd")
    assert job.state.parted == {fourth.id: refused}


# -- what follows ----------------------------------------------------------------------------------


def test_a_generation_ends_when_all_ranks_have_completed(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    assert job.advance() is None
    job.end(hosts[0], Result.COMPLETED)
    assert job.advance() is None
    job.end(hosts[1], Result.COMPLETED)
    assert job.advance() == Verdict(Next.END, "")
    assert job.state.is_over


@pytest.mark.parametrize(
    ("result", "restarts", "follows"),
    [
        (Result.CRASHED, 1, Next.RESTART),
        (Result.CRASHED, 0, Next.FAIL),
        (Result.FAILED, 1, Next.FAIL),
    ],
)
def test_a_failure_restarts_the_job_if_that_may_help(
    clock: Clock, result: Result, restarts: int, follows: Next
) -> None:
    job = Job(FIXED, clock, restarts=restarts)
    hosts = job.begin(2)
    job.end(hosts[1], result)
    verdict = job.decide()
    assert verdict.next is follows
    assert verdict.text.partition(";")[0] == "a rank of host 1 (10.0.0.1) failed"


def test_the_host_that_failed_first_is_waited_for(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    job.end(hosts[0], Result.SECONDARY)
    assert job.advance() is None, "it says that another was first"
    clock.now += 1
    job.end(hosts[1], Result.FAILED)
    assert job.advance() == Verdict(Next.FAIL, "a rank of host 1 (10.0.0.1) failed")


def test_a_secondary_failure_counts_if_no_other_comes(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    job.end(hosts[0], Result.SECONDARY)
    assert job.advance() is None
    clock.now += membership.SECONDARY + 0.5
    text = "a rank of host 0 (10.0.0.0) failed; continuing with 2 hosts"
    assert job.advance() == Verdict(Next.RESTART, text)


def test_a_lost_host_is_named_and_one_that_had_ended_well_is_no_loss(clock: Clock) -> None:
    job = Job(FIXED, clock)
    hosts = job.begin(2)
    job.lose(hosts[1])
    assert job.decide().text == "host 1 (10.0.0.1) was lost: no sign of life for 10 s"
    job = Job(FIXED, clock)
    hosts = job.begin(2)
    job.end(hosts[1], Result.COMPLETED)
    job.lose(hosts[1])
    assert job.advance() is None
    job.end(hosts[0], Result.COMPLETED)
    assert job.decide().next is Next.END


def test_a_signal_stops_a_fixed_job_after_the_grace_at_the_latest(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    job.end(hosts[0], Result.COMPLETED, StoppedBy.TERMINATE)
    assert job.advance() is None, "the other host saves"
    clock.now += STOP_GRACE
    assert job.advance() == Verdict(Next.FAIL, "host 0 (10.0.0.0) was stopped")


@pytest.mark.parametrize("result", [Result.COMPLETED, Result.SECONDARY])
@pytest.mark.parametrize("by", [StoppedBy.INTERRUPT, StoppedBy.TERMINATE])
def test_a_host_of_an_elastic_job_leaves_when_the_others_have_saved(
    clock: Clock, result: Result, by: StoppedBy
) -> None:
    job = Job(ELASTIC, clock)
    hosts = job.begin(2)
    job.step(*hosts)
    job.end(hosts[1], Result.COMPLETED, by)
    assert job.advance() is None
    job.end(hosts[0], result, StoppedBy.RANK)
    assert job.advance() == Verdict(Next.REGROUP, "host 1 (10.0.0.1) left; continuing with 1 host")
    text = "this host leaves; the job continues without it"
    assert job.state.parted == {hosts[1].id: Verdict(Next.LEAVE, text)}
    assert job.state.hosts == [hosts[0]]


def test_a_host_that_leaves_before_a_step_is_not_waited_for(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    hosts = job.begin(2)
    job.end(hosts[1], Result.COMPLETED, StoppedBy.TERMINATE)
    assert job.decide().next is Next.REGROUP


def test_ctrl_c_on_host_0_stops_an_elastic_job_and_sigterm_only_host_0(clock: Clock) -> None:
    for by, follows in ((StoppedBy.INTERRUPT, Next.END), (StoppedBy.TERMINATE, Next.REGROUP)):
        job = Job(ELASTIC, clock, restarts=1)
        hosts = job.begin(2)
        job.step(*hosts)
        job.end(hosts[0], Result.COMPLETED, by)
        job.end(hosts[1], Result.COMPLETED, StoppedBy.RANK)
        assert job.decide().next is follows
        assert job.state.restarts == 1


def test_ctrl_c_while_hosts_join_stops_the_job_and_tells_them(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    [first] = job.begin(1)
    second = make_host(1)
    assert job.admit(second) is None
    job.ready(second)
    job.end(first, Result.COMPLETED, StoppedBy.INTERRUPT)
    assert job.advance() == Verdict(Next.END, "")
    assert "ended before this host could join it" in job.state.parted[second.id].text


@pytest.mark.parametrize("lost", [False, True])
def test_hosts_on_probation_are_expelled_if_they_fail(clock: Clock, lost: bool) -> None:
    job = Job(ELASTIC, clock, restarts=0)
    job.begin(2)
    joined = job.join(2)
    assert joined.standing is Standing.PROBATION
    if lost:
        job.lose(joined)
    else:
        job.end(joined, Result.CRASHED)
    assert job.decide().next is Next.EXPEL, "that costs no restart"
    assert joined not in job.state.hosts
    text = "this host failed while it joined; the job continues without it"
    assert job.state.parted[joined.id] == Verdict(Next.EXPELLED, text)


def test_a_host_that_is_lost_beside_one_that_joins_costs_a_restart(clock: Clock) -> None:
    job = Job(ELASTIC, clock, restarts=1)
    hosts = job.begin(2)
    job.join(2)
    job.lose(hosts[1])
    assert job.decide().next is Next.RESTART
    assert job.state.restarts == 0


def test_probation_ends_when_every_host_has_completed_a_step(clock: Clock) -> None:
    job = Job(Nodes(2, 0, "a", 1, least=1), clock)
    [first] = job.begin(1)
    joined = job.join(1)
    job.step(joined)
    assert job.advance() is None
    assert joined.standing is Standing.PROBATION
    job.step(first)
    assert job.advance() is None
    assert joined.standing is Standing.MEMBER
    job.end(joined, Result.CRASHED)
    assert job.decide().next is Next.FAIL


def test_a_host_that_waits_to_join_and_vanishes_costs_nothing(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    job.begin(1)
    second = make_host(1)
    assert job.admit(second) is None
    job.advance()
    job.lose(second)
    clock.now += membership.LAST_CALL + 1
    assert job.advance() is None
    assert not job.state.regrouping


def test_regrouping_waits_for_all_to_save_but_not_forever(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    hosts = job.begin(2)
    job.step(*hosts)
    assert job.admit(make_host(2)) is None
    job.ready(make_host(2))
    job.advance()
    assert job.state.regrouping
    clock.now += 2 * STOP_GRACE
    job.end(hosts[0], Result.COMPLETED, StoppedBy.RANK)
    assert job.advance() is None
    clock.now += STOP_GRACE + 1
    assert job.advance() == Verdict(Next.REGROUP, "continuing with 3 hosts")


@pytest.mark.parametrize(
    ("silent", "follows"), [(1, Next.RESTART), (2, Next.RESTART), (3, Next.FAIL)]
)
def test_the_smaller_part_of_a_job_does_not_continue(
    clock: Clock, silent: int, follows: Next
) -> None:
    for loss, expected in ((HostLoss.SILENT, follows), (HostLoss.DEAD, Next.RESTART)):
        job = Job(Nodes(4, 0, "a", 1, least=1), clock, restarts=1)
        for host in job.begin(4)[4 - silent :]:
            job.lose(host, loss)
        verdict = job.decide()
        assert verdict.next is expected
        assert ("--auto-resume" in verdict.text) == (expected is Next.FAIL)


def test_hosts_that_go_silent_one_after_the_other_are_counted_together(clock: Clock) -> None:
    job = Job(Nodes(3, 0, "a", 1), clock, restarts=1)
    hosts = job.begin(3)
    job.lose(hosts[1], HostLoss.SILENT)
    assert job.decide().next is Next.RESTART
    job.ready(hosts[0])
    job.lose(hosts[2], HostLoss.SILENT)
    verdict = job.decide()
    assert verdict.next is Next.FAIL
    assert "--auto-resume" in verdict.text


def test_reports_of_another_generation_do_not_count(clock: Clock) -> None:
    job = Job(FIXED, clock, restarts=1)
    hosts = job.begin(2)
    job.tell(hosts[0], stepped=1, ended=-1, result=Result.FAILED)
    assert job.advance() is None
    assert not hosts[0].stepped
    assert hosts[0].result is None


@pytest.mark.parametrize("follows", list(Next))
def test_every_verdict_has_a_label_that_fits_its_column(follows: Next) -> None:
    assert 0 < len(follows.label) < 11
    assert not (follows.begins_again and follows.label == "error:")


# -- the value -------------------------------------------------------------------------------------


def test_what_is_written_is_read_the_same() -> None:
    host = Host("id1", 1, "10.0.0.1", 29400, 4321, Standing.PROBATION)
    lost = replace(
        host,
        ready=True,
        stepped=True,
        result=Result.CRASHED,
        stopped_by=StoppedBy.RANK,
        loss=HostLoss.SILENT,
        why_lost="no sign of life for 10 s",
    )
    full = JobState(
        job="a job",
        terms={"--nproc": 2, "--lr": 0.1, "--mesh": None, "--compile": True, "--data": "größer"},
        restarts=3,
        generation=2,
        hosts=[lost, host],
        verdict=Verdict(Next.RESTART, "a rank failed"),
        parted={"id9": Verdict(Next.LEAVE, "it leaves"), "id7": Verdict(Next.REFUSE)},
        regrouping=True,
        stopped="host 0",
        silent=1,
        failed={"10.0.0.9": 1.5e9},
        notices=["one", "two"],
        noticed=18,
        server="id1",
        moves=2,
    )
    for state in (JobState(), full):
        written = plain.written(state)
        assert plain.read(JobState, written) == state
        assert plain.written(plain.read(JobState, written)) == written, "order counts, too"


def test_the_value_does_not_grow_with_the_hosts_that_came_and_went(clock: Clock) -> None:
    job = Job(ELASTIC, clock)
    job.begin(1)
    sizes = []
    for number in range(400):
        job.state._admit(f"twin {number:3}", HostReport(0, f"10.1.1.{number:3}"), ELASTIC)
        host = Host(f"one {number:3}", 1, f"10.0.0.{number:3}")
        host.standing, host.result = Standing.PROBATION, Result.CRASHED
        job.state.hosts.append(host)
        job.reports[host.id] = HostReport(1, host.address)
        assert job.advance() is not None
        job.ready(*job.state.hosts)
        assert job.advance() is None
        sizes.append(len(plain.written(job.state)))
        assert host.id in job.state.parted, "it has to read this"
    assert max(sizes[100:]) < 1.1 * sizes[100]
    assert sizes[-1] < 2**15


# -- any order of facts ----------------------------------------------------------------------------

_ENDS = {
    "completed": Outcome(0),
    "crashed": Outcome(1, Result.CRASHED),
    "secondary": Outcome(1, Result.SECONDARY),
    "saved": Outcome(143, stopped_by=StoppedBy.RANK),
    "dead": HostLoss.DEAD,
    "silent": HostLoss.SILENT,
}


def test_all_orders_of_the_facts_of_three_hosts_lead_to_the_same(clock: Clock) -> None:
    """One look may see any number of facts: they come one by one, and all at once."""
    for ends in itertools.product(_ENDS.values(), repeat=3):
        follows: set[object] = set()
        for order in (*itertools.permutations(range(3)), ()):
            job = Job(ELASTIC, clock, restarts=1)
            hosts = job.begin(3)
            job.step(*hosts)
            for at in order or range(3):
                end = ends[at]
                if isinstance(end, HostLoss):
                    job.lose(hosts[at], end)
                elif hosts[at].id in job.reports:
                    job.end(hosts[at], end.result, end.stopped_by)
                if order:
                    job.advance()
                    job.advance()  # a second look at the same changes nothing
            job.advance()
            if not job.state.is_over:
                job.ready(*job.state.hosts)
                job.advance()
                assert job.state.generation == bool(job.state.hosts)
                assert not job.losses.keys() & {host.id for host in job.state.hosts}
            verdict = job.state.verdict
            if verdict is not None and job.state.is_over:
                follows.add(verdict.next)
            else:
                world = tuple(host.id for host in job.state.members)
                follows.add((world, job.state.restarts))
        assert len(follows) == 1, f"{ends}: {follows}"


class Meeting:
    """What hosts report, and what the host that serves publishes; it may be any of them."""

    def __init__(self, nodes: Nodes, restarts: int, clock: Clock) -> None:
        self.nodes, self.clock = nodes, clock
        self.state = JobState(restarts=restarts)
        self.timers = Timers(clock.monotonic)
        self.reports: dict[str, HostReport] = {}
        self.losses: Losses = {}
        self.plan = plain.written(self.state)
        self.history = [self.plan]

    def look(self) -> None:
        """Decide by what has been reported by now."""
        here = {host.id for host in self.state.hosts}
        losses = {id_: loss for id_, loss in self.losses.items() if id_ in here}
        reports = {
            id_: each for id_, each in self.reports.items() if id_ in here or id_ not in self.losses
        }
        self.state.look(reports, losses, self.nodes, self.timers)
        plan = plain.written(self.state)
        assert plain.read(JobState, plan) == self.state
        if plan != self.plan:
            self.plan = plan
            self.history.append(plan)

    def move(self, known: JobState, fast: float) -> None:
        """Let another host decide, which knows what it has read, and by its own clock."""
        self.state, self.timers = known, Timers(lambda: fast * self.clock.now)
        self.reports = {}


class Player:
    """A host that behaves as an agent with its rendezvous, one small move at a time."""

    def __init__(self, meeting: Meeting, me: Host) -> None:
        self.meeting, self.id = meeting, me.id
        self.generation = -1
        self.worlds: dict[int, list[str]] = {}  # that it has seen, by generation
        self.runs = self.is_gone = self.has_read = False
        self.seen = JobState()
        self.report = HostReport(me.number, me.address, awaits=-1)

    def write(self) -> None:
        self.meeting.reports[self.id] = self.report

    def read(self) -> None:
        self.seen, self.has_read = plain.read(JobState, self.meeting.plan), True
        seen, me = self.seen, self.seen.host(self.id)
        if me is None and self.id not in seen.parted and not self.runs and not seen.is_over:
            return  # it has not been seen yet, or counts as lost
        overtaken = self.runs and seen.generation > self.generation
        if me is None or seen.is_over or overtaken:
            assert me is None or not overtaken, "it would not be ready"
            self.is_gone = True
        elif self.runs and not seen.is_running:
            self.runs = False
            self.report = replace(self.report, awaits=self.generation)
        elif seen.generation > self.generation and me in seen.members and not seen.is_running:
            self.generation = seen.generation  # which it has missed
            self.report = replace(self.report, awaits=self.generation)
        elif seen.generation > self.generation and me in seen.members:
            self.runs, self.generation = True, seen.generation
            self.worlds[seen.generation] = [host.id for host in seen.members]

    def end(self, outcome: Outcome) -> None:
        if self.runs and self.report.ended != self.generation:
            by = outcome.stopped_by
            self.report = replace(
                self.report, ended=self.generation, result=outcome.result, stopped_by=by
            )

    def step(self) -> None:
        self.report = replace(self.report, stepped=self.generation)


def check_history(history: list[bytes], nodes: Nodes, restarts: int) -> dict[int, list[str]]:
    """Check each state against the one before; return the hosts of every generation."""
    worlds: dict[int, list[str]] = {}
    states = [plain.read(JobState, value) for value in history]
    refused: set[str] = set()
    restarted = 0
    for before, after in itertools.pairwise(states):
        assert after.generation - before.generation in (0, 1)
        assert not before.is_over or after.verdict == before.verdict
        ids = [host.id for host in after.hosts]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(after.parted)
        members = [host.id for host in after.members]
        if after.is_running:
            assert members == worlds.setdefault(after.generation, members)
            assert not refused & set(members), "a host that was refused takes part"
        if after.generation > before.generation:
            # After a loss, a fixed job continues with those that remain.
            least = nodes.least or (1 if after.generation else nodes.count)
            assert least <= len(members) <= nodes.count
            assert nodes.why_not(len(members)) is None
            if before.generation >= 0:
                assert before.verdict is not None
                assert before.verdict.next.begins_again
        decided = after.verdict is not None and before.verdict != after.verdict
        restarted += decided and after.verdict is not None and after.verdict.next is Next.RESTART
        assert after.restarts == restarts - restarted >= 0
        if after.regrouping and not before.regrouping:
            assert any(host.standing is Standing.JOINING for host in after.hosts)
        refused |= {id_ for id_, it in after.parted.items() if it.next is Next.REFUSE}
    return worlds


_OUTCOMES = [
    Outcome(0),
    Outcome(1, Result.FAILED),
    Outcome(1, Result.CRASHED),
    Outcome(1, Result.SECONDARY),
    Outcome(143, stopped_by=StoppedBy.RANK),
    Outcome(143, stopped_by=StoppedBy.TERMINATE),
    Outcome(130, stopped_by=StoppedBy.INTERRUPT),
]


@pytest.mark.parametrize(
    ("nodes", "odd"),
    [
        (Nodes(3, 0, "a", 1, timeout=60.0), 0),
        (Nodes(4, 0, "a", 1, timeout=60.0, least=1), 0),
        (Nodes(5, 0, "a", 1, timeout=60.0, least=2), 3),
    ],
)
def test_all_orders_of_events_keep_the_rules(clock: Clock, nodes: Nodes, odd: int) -> None:
    generations = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        restarts = chance.randrange(4)
        job = replace(nodes, why_not=lambda hosts: "odd" if hosts == odd else None)
        meeting, players = Meeting(job, restarts, clock), list[Player]()

        def come(number: int) -> None:
            me = make_host(number)
            me.id = f"{len(players)}"  # noqa: B023
            players.append(Player(meeting, me))  # noqa: B023

        for number in range(nodes.count):
            come(number)
        for move in range(1500):
            clock.now += chance.choice([0.0, 0.01, 0.1, 2.0])
            here = [player for player in players if not player.is_gone]
            if not here:
                break
            player = chance.choice(here)
            match chance.randrange(3):
                case 0:
                    player.write()
                case 1:
                    player.read()
                case 2:
                    meeting.look()
            if player.is_gone or move > 1000:
                player.end(chance.choice(_OUTCOMES[:5]))
                continue
            if player.seen.regrouping and chance.random() < 0.2:
                player.end(_OUTCOMES[4])
            if player.runs and chance.random() < 0.3:
                player.step()
            match chance.randrange(200):
                case 0 | 1 | 2:
                    player.end(chance.choice(_OUTCOMES))
                case 3:
                    player.is_gone = True
                    meeting.losses[player.id] = chance.choice(list(HostLoss)[1:]), "it is gone"
                case 4:
                    meeting.losses[player.id] = HostLoss.SILENT, "it is gone"
                case 5 | 6:
                    meeting.move(plain.read(JobState, meeting.plan), fast=chance.uniform(0.8, 1.2))
                case 11 | 12 | 13 if nodes.is_elastic and len(players) < 12:
                    come(chance.choice([UNNUMBERED, UNNUMBERED, 0, 1]))
        worlds = check_history(meeting.history, job, restarts)
        generations += len(worlds)
        for player in players:
            for generation, world in player.worlds.items():
                assert world == worlds[generation], f"seed {seed}: hosts disagree"
        state = meeting.state
        known = {host.id for host in state.hosts} | set(state.parted) | set(meeting.losses)
        for player in players:
            forgotten = player.id in meeting.reports and player.id not in known
            assert player.is_gone or not forgotten, f"seed {seed}: forgotten"
        lost = set(meeting.losses)
        assert state.is_over or all(player.is_gone or player.id in lost for player in players), (
            f"seed {seed}: no end"
        )
    assert generations > SEEDS, "nothing happened"
