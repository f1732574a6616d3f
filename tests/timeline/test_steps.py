"""What a step's time went into, and who waited for whom."""

from __future__ import annotations

import pytest

from shardwise.base.observe import Activity
from shardwise.base.spans import Span
from shardwise.timeline.rank import Step
from shardwise.timeline.steps import Part, StepOfRank, StepWait, Timeline
from tests.timeline.ranks import collective, rank, span, wait


def _alone(*spans: Span) -> StepOfRank:
    [step] = Timeline((rank(0, spans),)).steps
    return step.ranks[0]


def test_parts_of_a_step_add_up_to_it_and_what_is_inside_counts_first() -> None:
    mine = _alone(
        span(Activity.FORWARD, 0, 4),
        span(Activity.FORWARD, 1, 3, "layers.0.mlp"),
        span(Activity.UNSHARD, 1, 1.5),
        wait(2, 3),
        span(Activity.BACKWARD, 4, 8),
        span(Activity.FORWARD, 5, 6, "again"),
        span(Activity.REDUCE, 8, 8.25),
        span(Activity.COPY, 8.25, 8.5),
        span(Activity.OPTIMIZER, 8.5, 9),
    )
    assert mine.parts == {
        Part.FORWARD: 2.5,
        Part.BACKWARD: 3.0,
        Part.RECOMPUTE: 1.0,
        Part.OPTIMIZER: 0.5,
        Part.RUNTIME: 0.75,
        Part.COPY: 0.25,
        Part.WAIT: 1.0,
        Part.OTHER: 1.0,
    }
    assert sum(mine.parts.values()) == mine.step.seconds
    assert mine.busy == 9.0


def test_what_lies_outside_of_a_step_does_not_count() -> None:
    mine = _alone(span(Activity.FORWARD, -2, 1), wait(9, 12), wait(11, 12))
    assert mine.parts[Part.FORWARD] == 1.0
    assert mine.parts[Part.WAIT] == 1.0


def test_waits_of_several_threads_count_once() -> None:
    other = wait(2, 5)._replace(thread=1)
    assert _alone(wait(1, 4), other).parts[Part.WAIT] == 4.0


def test_times_of_the_device_count_if_they_are_known() -> None:
    ahead = wait(1, 9)._replace(device=(5.0, 5.5))  # the host waits long before
    mine = _alone(span(Activity.FORWARD, 0, 1)._replace(device=(1.0, 6.0)), ahead)
    assert mine.parts[Part.WAIT] == 0.5
    assert mine.parts[Part.FORWARD] == 4.5


def test_a_wait_says_which_rank_came_late_and_what_the_bytes_took() -> None:
    early = rank(0, [collective(1, 6), wait(2, 5.9)])
    late = rank(1, [collective(4, 6), wait(4.5, 5.9)])
    [step] = Timeline(
        (
            early,
            late,
        )
    ).steps
    first, second = step.ranks
    assert first.waits == (
        StepWait("layers.0", "dp", pytest.approx(2.0), 1),
        StepWait("layers.0", "dp", pytest.approx(1.9), None),
    )
    assert second.waits == (StepWait("layers.0", "dp", pytest.approx(1.4), None),)
    assert step.slowest == 1
    assert step.waited_for(1) == pytest.approx(2.0)
    assert step.waited_for(0) == 0.0


def test_waits_for_the_same_group_belong_to_their_own_collectives() -> None:
    def spans(issued: float) -> list[Span]:
        return [
            *(collective(0, 1.1), wait(0.5, 1)),
            *(collective(issued, 7.1, activity=Activity.REDUCE_SCATTER), wait(5, 7)),
        ]

    [step] = Timeline(
        (
            rank(0, spans(4.5)),
            rank(1, spans(6.0)),
        )
    ).steps
    assert [(w.peer, w.seconds) for w in step.ranks[0].waits if w.peer is not None] == [
        (1, pytest.approx(1.0))
    ]


def test_collectives_among_other_ranks_are_not_compared() -> None:
    early = [collective(1, 6, members=(0, 2)), wait(2, 5.9)]
    late = [collective(4, 6, members=(1, 3)), wait(4.5, 5.9)]
    [step] = Timeline(
        (
            rank(0, early, size=4),
            rank(1, late, size=4),
        )
    ).steps
    assert [each.peer for mine in step.ranks for each in mine.waits] == [None, None]


def test_transports_that_know_whom_they_wait_for_are_believed() -> None:
    peers = [Span(Activity.PEER, "3", 2, 4), Span(Activity.PEER, "1", 4, 4.5)]
    mine = _alone(wait(1.5, 5), *peers)
    assert {each.peer: each.seconds for each in mine.waits} == {3: 2.0, 1: 0.5, None: 1.0}
    assert mine.waited_for(3) == 2.0


def test_the_typical_step_is_not_the_first_which_warms_up() -> None:
    steps = [Step(n, 10.0 * n, 10.0 * n + length) for n, length in enumerate((9, 1, 3, 2), 1)]
    for recorded, number in ((steps, 4), (steps[:1], 1)):
        found = Timeline((rank(0, [], recorded),)).typical
        assert found is not None
        assert found.number == number


def test_a_step_that_only_some_ranks_recorded_has_those() -> None:
    both, own = Step(1, 0.0, 1.0), Step(2, 1.0, 3.0)
    steps = Timeline(
        (
            rank(0, [], [both]),
            rank(1, [], [both, own]),
        )
    ).steps
    assert [[each.rank for each in step.ranks] for step in steps] == [[0, 1], [1]]
    assert steps[1].seconds == 2.0
