"""Who takes part in which round, in every order in which replicas may come, stall and go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from shardwise.base import plain
from shardwise.diloco.coordinator import (
    Attempt,
    Coordinator,
    Event,
    EventKind,
    ReplicaReport,
    RoundPlan,
    State,
    client_name,
)
from shardwise.elastic.registry import Presence

DEADLINE, START = 10.0, 60.0
_incarnations = itertools.count()


class Replica:
    """A replica without a model: it reports what it is told to, and applies what is committed."""

    def __init__(
        self, number: int, version: int = 0, settings: str = "same", digest: str = "d"
    ) -> None:
        self.number = number
        self.silent_since: float | None = None
        self.is_connected = True
        self.report = ReplicaReport(
            f"i{next(_incarnations)}", 1, settings, digest, version, State.JOINING
        )

    def reports(self, state: State | None = None, **changes: int) -> None:
        self.report = replace(self.report, **changes)  # type: ignore[arg-type]
        if state is not None:
            self.report = replace(self.report, state=state)

    def ready(self, tokens: int = 100) -> None:
        self.reports(State.READY, tokens=tokens)


class World:
    """Replicas and their coordinator, on a clock that the test turns."""

    def __init__(self, *replicas: Replica, expected: int | None = None) -> None:
        count = len(replicas) if expected is None else expected
        self.coordinator = Coordinator(count, DEADLINE, START, lambda: self.now)
        self.replicas = {each.number: each for each in replicas}
        self.now = 0.0
        self.events: list[Event] = []

    def add(self, replica: Replica) -> Replica:
        self.replicas[replica.number] = replica
        return replica

    @property
    def plan(self) -> RoundPlan:
        return plain.read(RoundPlan, plain.written(self.coordinator.plan))

    @property
    def attempt(self) -> Attempt:
        assert self.plan.attempt is not None
        return self.plan.attempt

    def look(self, seconds: float = 0.0) -> None:
        """Look until ``seconds`` have passed, as often as a server does."""
        until = self.now + seconds
        while True:
            reports = {str(number): each.report for number, each in self.replicas.items()}
            silence = {}
            for number, each in self.replicas.items():
                since = each.silent_since
                if each.is_connected:
                    name = client_name(number, each.report.incarnation, 0)
                    silence[name] = 0.0 if since is None else self.now - since
            self.events += self.coordinator.look(Presence(reports, silence, {}))
            if self.now >= until:
                return
            self.now += 0.5

    def begin(self) -> None:
        """Let all replicas take part."""
        self.look()
        for each in self.replicas.values():
            each.reports(State.TRAINING)
        self.look()

    def average(self, numbers: Iterable[int]) -> Attempt:
        """Let replicas report that they have the result of the attempt."""
        attempt = self.attempt
        for number in numbers:
            self.replicas[number].reports(State.AVERAGED, attempt=attempt.number)
        self.look()
        return attempt

    def apply(self, numbers: Iterable[int]) -> None:
        """Let replicas apply the round that is committed."""
        for number in numbers:
            self.replicas[number].reports(State.TRAINING, version=self.plan.version, tokens=0)
        self.look()

    def round_of(self, *numbers: int) -> Attempt:
        """Let some replicas make a round, which waits for nobody else."""
        for number in numbers:
            self.replicas[number].ready()
        self.look()
        if self.plan.attempt is None:
            self.look(DEADLINE)
        attempt = self.average(numbers)
        self.apply(numbers)
        return attempt

    def fetch(self, number: int) -> None:
        """Let a replica take the state that the plan has for it."""
        fetch = self.plan.fetches[number]
        self.replicas[number].reports(
            State.TRAINING, version=self.plan.version, fetched=fetch.number
        )
        self.look()

    def pause(self, number: int) -> None:
        self.replicas[number].silent_since = self.now

    def wake(self, number: int) -> None:
        self.replicas[number].silent_since = None
        self.look()

    def kinds(self, kind: EventKind) -> list[Event]:
        return [event for event in self.events if event.kind is kind]


def three() -> World:
    world = World(Replica(0), Replica(1), Replica(2))
    world.begin()
    return world


def three_ready() -> World:
    world = three()
    for each in world.replicas.values():
        each.ready()
    world.look()
    return world


def test_a_round_is_committed_once_all_have_averaged() -> None:
    world = three()
    for number, tokens in ((0, 300), (1, 200), (2, 100)):
        assert world.plan.attempt is None
        world.replicas[number].ready(tokens)
        world.look()
    assert world.attempt.tokens == {0: 300, 1: 200, 2: 100}
    world.average([0, 1])
    assert world.plan.version == 0
    world.average([2])
    assert world.plan.version == 1
    assert world.plan.attempt is None


def test_the_others_are_called_when_the_first_is_ready() -> None:
    world = three()
    assert not world.plan.called
    world.replicas[1].ready()
    world.look()
    assert world.plan.called
    world.round_of(0, 1, 2)
    assert not world.plan.called


def test_a_late_replica_is_left_out_after_the_deadline_and_catches_up() -> None:
    world = three()
    world.replicas[0].ready()
    world.replicas[1].ready()
    world.look(DEADLINE - 1)
    assert world.plan.attempt is None
    world.look(1)
    assert list(world.attempt.members) == [0, 1]
    world.average([0, 1])
    world.apply([0, 1])
    assert [event.late for event in world.kinds(EventKind.ROUND)] == [(2,)]
    assert world.plan.fetches[2].source == 0
    world.fetch(2)
    assert not world.plan.fetches
    assert list(world.round_of(0, 1, 2).members) == [0, 1, 2]


def test_a_replica_that_comes_too_late_for_its_round_catches_up_though_it_is_ready() -> None:
    world = three()
    world.replicas[0].ready()
    world.replicas[1].ready()
    world.look(DEADLINE)
    world.replicas[2].ready()
    world.average([0, 1])
    world.apply([0, 1])
    assert world.plan.attempt is None
    assert world.plan.fetches[2].version == 1


def test_nobody_waits_for_a_replica_that_has_died() -> None:
    world = three()
    world.replicas[2].is_connected = False
    assert list(world.round_of(0, 1).members) == [0, 1]
    assert world.now < DEADLINE
    assert [event.replica for event in world.kinds(EventKind.LOST)] == [2]


def test_an_attempt_is_given_up_when_a_member_dies_in_the_exchange() -> None:
    world = three_ready()
    first = world.attempt
    world.average([0])
    world.replicas[2].is_connected = False
    world.look()
    second = world.attempt
    assert (list(first.members), list(second.members)) == ([0, 1, 2], [0, 1])
    assert second.group != first.group
    assert world.plan.version == 0
    world.average([0, 1])
    assert world.plan.version == 1


def test_a_member_that_dies_before_the_commit_takes_its_part_with_it() -> None:
    """It has the result, and so has another: neither may apply it."""
    world = three_ready()
    world.average([1, 2])
    world.replicas[2].is_connected = False
    world.average([0])
    assert world.plan.version == 0
    assert list(world.attempt.members) == [0, 1]


def test_a_member_that_dies_after_the_commit_changes_nothing() -> None:
    world = three_ready()
    world.average([0, 1, 2])
    world.replicas[2].is_connected = False
    world.apply([0, 1])
    assert world.plan.version == 1
    assert list(world.round_of(0, 1).members) == [0, 1]


def test_a_member_that_pauses_in_the_exchange_is_left_out_after_the_deadline() -> None:
    world = three_ready()
    world.pause(2)
    world.average([0, 1])
    world.look(DEADLINE - 1)
    assert list(world.attempt.members) == [0, 1, 2]
    world.look(1.5)
    assert list(world.attempt.members) == [0, 1]
    world.average([0, 1])
    world.apply([0, 1])
    assert world.plan.version == 1
    assert not world.plan.fetches  # nobody sends to one that cannot receive
    world.wake(2)
    assert world.plan.fetches[2].version == 1


def test_a_member_that_pauses_with_its_result_does_not_hold_up_the_commit() -> None:
    world = three_ready()
    world.average([2])
    world.pause(2)
    world.look(DEADLINE + 1)
    world.average([0, 1])
    assert world.plan.version == 1
    world.apply([0, 1])
    world.round_of(0, 1)
    world.wake(2)
    world.apply([])
    world.replicas[2].reports(State.TRAINING, version=1, tokens=0)  # it applies the first round
    world.look()
    assert world.plan.fetches[2].version == 2


def test_nobody_begins_a_round_while_others_apply_the_last_one() -> None:
    world = three_ready()
    world.average([0, 1, 2])
    world.apply([0])
    world.replicas[0].ready()
    world.look()
    assert world.plan.attempt is None
    assert not world.plan.fetches
    world.apply([1, 2])
    assert world.plan.called


def test_the_last_one_goes_on_alone() -> None:
    world = three()
    world.replicas[1].is_connected = world.replicas[2].is_connected = False
    assert list(world.round_of(0).members) == [0]
    assert world.plan.version == 1


def test_two_join_at_once_and_take_part_in_the_round() -> None:
    world = World(Replica(0), expected=1)
    world.begin()
    world.round_of(0)
    world.add(Replica(1))
    world.add(Replica(2))
    world.look()
    assert {fetch.source for fetch in world.plan.fetches.values()} == {0}
    world.fetch(1)
    world.fetch(2)
    assert [event.replica for event in world.kinds(EventKind.JOINED)] == [0, 1, 2]
    assert list(world.round_of(0, 1, 2).members) == [0, 1, 2]


def test_nobody_waits_for_one_that_is_catching_up() -> None:
    world = three()
    world.round_of(0, 1, 2)
    world.replicas[2].is_connected = False
    world.look()
    world.add(Replica(2))
    world.look()
    assert 2 in world.plan.fetches
    before = world.now
    assert list(world.round_of(0, 1).members) == [0, 1]
    assert world.now == before


def test_a_replica_that_returns_twice_is_a_new_one_each_time() -> None:
    world = three()
    world.round_of(0, 1, 2)
    numbers = []
    for _ in range(2):
        world.replicas[2].is_connected = False
        world.look()
        world.add(Replica(2))
        world.look()
        fetch = world.plan.fetches[2]
        assert fetch.incarnation == world.replicas[2].report.incarnation
        numbers.append(fetch.number)
    assert numbers[0] != numbers[1]


def test_a_new_start_takes_the_place_of_one_that_the_server_still_hears() -> None:
    world = three_ready()
    old = world.replicas[2].report.incarnation
    world.add(Replica(2))
    world.look()
    assert old not in world.attempt.members.values()
    assert list(world.attempt.members) == [0, 1]
    assert [event.replica for event in world.kinds(EventKind.LOST)] == [2]


def test_another_source_is_tried_when_one_is_lost_or_fails() -> None:
    world = three()
    world.round_of(0, 1, 2)
    late = world.add(Replica(3))
    world.look()
    first = world.plan.fetches[3]
    late.reports(refetch=first.number)
    world.look()
    second = world.plan.fetches[3]
    assert (first.source, second.source) == (0, 1)
    world.replicas[1].is_connected = False
    world.look()
    assert world.plan.fetches[3].source == 2


def test_everyone_late_is_nobody_late() -> None:
    """A deadline begins when somebody is ready, however long that takes."""
    world = three()
    world.look(10 * DEADLINE)
    assert world.plan.attempt is None
    assert list(world.round_of(0, 1, 2).members) == [0, 1, 2]
    assert [event.late for event in world.kinds(EventKind.ROUND)] == [()]


def test_reports_that_come_again_change_nothing() -> None:
    world = three()
    attempt = world.round_of(0, 1, 2)
    for each in world.replicas.values():
        each.reports(State.AVERAGED, attempt=attempt.number, version=0)
    world.look()
    assert world.plan.version == 1
    assert world.plan.attempt is None
    assert len(world.kinds(EventKind.ROUND)) == 1


def test_the_group_is_kept_while_the_members_are_the_same() -> None:
    world = three()
    first, second = world.round_of(0, 1, 2), world.round_of(0, 1, 2)
    world.replicas[2].is_connected = False
    third = world.round_of(0, 1)
    assert first.group == second.group
    assert third.group != second.group


def test_a_failed_attempt_is_made_again_with_new_connections() -> None:
    world = three_ready()
    first = world.attempt
    world.replicas[1].reports(State.FAILED, attempt=first.number)
    world.look()
    second = world.attempt
    assert second.members == first.members
    assert second.group != first.group


def test_members_that_cannot_reach_each_other_do_without_one_of_them() -> None:
    world = three_ready()
    left_out = []
    for _ in range(5):
        attempt = world.attempt
        left_out += [number for number in world.replicas if number not in attempt.members]
        for number in attempt.members:
            world.replicas[number].reports(State.FAILED, attempt=attempt.number)
        world.look()
    assert left_out == [2, 1, 0]


def test_the_replica_with_the_most_rounds_leads_after_a_restart_of_all() -> None:
    world = World(Replica(0, version=8), Replica(1, version=10), Replica(2, version=10))
    world.look()
    assert world.plan.version == 10
    assert world.plan.welcome == tuple(world.replicas[r].report.incarnation for r in (1, 2))
    assert world.plan.fetches[0].source == 1


def test_a_replica_with_another_start_takes_that_of_the_first() -> None:
    world = World(Replica(0), Replica(1, digest="another"))
    world.look()
    assert world.plan.fetches[1].source == 0


def test_replicas_that_have_trained_since_they_joined_are_not_taken_for_equal() -> None:
    # Each was alone with a server of its own, since a server that is gone welcomed both.
    world = World(Replica(0, version=3), Replica(1, version=3))
    for each in world.replicas.values():
        each.reports(State.TRAINING)
    world.look()
    assert world.plan.fetches[1].source == 0


def test_the_first_waits_for_the_others_at_the_start_but_not_forever() -> None:
    world = World(Replica(0), expected=3)
    world.look(START - 1)
    assert world.plan.version == -1
    world.look(1)
    assert world.plan.version == 0


def test_all_die_and_come_together_again() -> None:
    world = three()
    world.round_of(0, 1, 2)
    for each in world.replicas.values():
        each.is_connected = False
    world.look()
    for number in range(3):
        world.add(Replica(number, version=1 if number == 1 else 0))
    world.look()
    assert world.plan.version == 1
    assert sorted(world.plan.fetches) == [0, 2]
    assert all(fetch.source == 1 for fetch in world.plan.fetches.values())


def test_one_that_has_left_is_not_lost() -> None:
    world = three()
    world.replicas[2].reports(State.LEFT)
    world.look()
    assert [event.replica for event in world.kinds(EventKind.LEFT)] == [2]
    assert not world.kinds(EventKind.LOST)
    assert list(world.round_of(0, 1).members) == [0, 1]


def test_other_settings_are_refused_by_name() -> None:
    world = World(Replica(0, settings="every=50"), Replica(1, settings="every=20"))
    world.look()
    told = world.plan.refused[world.replicas[1].report.incarnation]
    assert "replica 1 has every=20" in told
    assert "replica 0 has every=50" in told
    world.replicas[0].reports(State.TRAINING)
    assert list(world.round_of(0).members) == [0]


def test_what_is_reported_under_no_number_of_a_replica_is_left_out() -> None:
    coordinator = Coordinator(1, DEADLINE, START, lambda: 0.0)
    report = Replica(0).report
    silence = {client_name(n, report.incarnation, 0): 0.0 for n in (-1, int("9" * 40))}
    for key in ("x", "", "-1", "1.5", "²", "9" * 40):
        assert not coordinator.look(Presence({key: report}, silence, {}))
    assert coordinator.plan.version == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"version": 1.5},
        {"tokens": True},
        {"tokens": 2**80},
        {"ranks": 0},
        {"ranks": 10**9},
        {"incarnation": "a/b"},
        {"incarnation": ""},
        {"settings": None},
        {"settings": "x" * 10_000},
        {"surplus": 1},
    ],
)
def test_a_report_with_impossible_values_is_refused(changes: dict[str, object]) -> None:
    values = {**json.loads(plain.written(Replica(0).report)), **changes}
    with pytest.raises(ValueError, match="ReplicaReport"):
        plain.read(ReplicaReport, json.dumps(values).encode())


def test_each_rank_of_a_replica_has_to_be_heard() -> None:
    report = replace(Replica(0).report, ranks=2)
    coordinator = Coordinator(1, DEADLINE, START, lambda: 0.0)
    silence = {client_name(0, report.incarnation, 0): 0.0}
    coordinator.look(Presence({"0": report}, silence, {}))
    assert coordinator.plan.version == -1
    silence[client_name(0, report.incarnation, 1)] = 0.0
    coordinator.look(Presence({"0": report}, silence, {}))
    assert coordinator.plan.version == 0
