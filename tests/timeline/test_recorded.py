"""Costs are read from parts of recorded steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.base.observe import Activity
from shardwise.base.spans import Span
from shardwise.insight.planning.calibrate import Calibration
from shardwise.insight.planning.events import (
    Event,
    Log,
    Mark,
    Op,
    Start,
    StepPhase,
    Wait,
)
from shardwise.insight.planning.rehearsal import rehearse
from shardwise.timeline import recorded as module
from shardwise.timeline.rank import RankTimeline, Step
from shardwise.timeline.recorded import (
    SmallTraining,
    costs_on_device,
    equations,
    measure_machine,
    seconds_of_op,
    solve,
    work_of_parts,
)

OP = Op("aten.mul.Tensor", "", StepPhase.FORWARD, 0, 10, (), "float32", False)
EVENTS: tuple[Event, ...] = (
    Mark(Activity.FORWARD, "a"),
    Start(1, Activity.ALL_GATHER, "dp", 2, "a", 200, 1, "shm"),
    Wait(1),
    OP,
    OP,
    Mark(Activity.BACKWARD, "a"),
    replace(OP, name="aten.mm.default", phase=StepPhase.BACKWARD, flops=1000),
    replace(OP, phase=StepPhase.OPTIMIZER, shapes=((2,), (2,), (2,))),
    Mark(Activity.OPTIMIZER, "AdamW"),
    replace(OP, phase=StepPhase.OPTIMIZER),
)
WORK = [
    {"call.forward": 2, "bytes.float32": 20, "launch.shm": 1, "sent.shm": 100},
    {"call.backward": 1, "product.float32": 1000},
    {"call.optimizer": 4, "bytes.optimizer": 20},
]


def log(*events: Event) -> Log:
    return Log(rank=0, before={}, events=events, tokens=1, flops=0)


def recorded(*steps: tuple[float, float, float, float], device: float = 0.0) -> RankTimeline:
    """A rank that begins forward, backward and clipping, and ends, at these times of each step.

    On the device, everything is later by ``device``, and the end once more.
    """
    spans, found = [], []
    for number, (forward, backward, clipping, end) in enumerate(steps):
        found.append(Step(number, forward, end))
        for activity, begin, until in (
            (Activity.FORWARD, forward, backward),
            (Activity.BACKWARD, backward, clipping),
            (Activity.WAIT, backward, clipping),
            (Activity.OPTIMIZER, clipping, clipping),
            (Activity.OPTIMIZER, clipping, end),
        ):
            on = (begin + device, until + 2 * device) if device else None
            spans.append(Span(activity, "a", begin, until, device=on))
    return RankTimeline(
        rank=0,
        world_size=1,
        host="here",
        device="cpu",
        begin=0.0,
        end=100.0,
        spans=tuple(spans),
        steps=tuple(found),
    )


def test_a_log_is_divided_where_groups_begin_and_the_optimizer_begins() -> None:
    assert work_of_parts(log(*EVENTS)) == WORK


def test_parts_take_the_median_of_ranks_and_steps() -> None:
    ranks = [recorded((0, 1, 3, 6), (10, 12, 15, 19)), recorded((0, 3, 4, 4.5))]
    assert equations(log(*EVENTS), ranks) == list(zip(WORK, (2, 2, 3), strict=True))


def test_parts_of_equal_work_are_one_equation() -> None:
    twice = log(*EVENTS[:5], *EVENTS[:5])
    ranks = [recorded((0, 1, 3, 6))]
    assert len(work_of_parts(twice)) == 2
    with pytest.raises(ValueError, match="zip"):
        equations(twice, ranks)  # a timeline of another training
    both = replace(ranks[0], spans=tuple(s for s in ranks[0].spans if s.begin < 3))
    spans = (*both.spans, both.spans[0]._replace(activity=Activity.OPTIMIZER, begin=3, end=3))
    step = log(*EVENTS[:5], *EVENTS[:5], replace(OP, phase=StepPhase.OPTIMIZER))
    found = equations(step, [replace(both, spans=spans)])
    assert [seconds for _, seconds in found] == [1.5, 3]


def test_times_of_the_device_count_where_they_are_known() -> None:
    ranks = [recorded((0, 1, 3, 6), device=2.0)]
    assert [seconds for _, seconds in equations(log(*EVENTS), ranks)] == [1, 2, 5]
    assert seconds_of_op(log(*EVENTS), ranks) == 6 / 5


def test_steps_whose_device_waited_for_work_tell_of_the_host_only() -> None:
    product = replace(EVENTS[6], flops=500)
    more = log(*EVENTS[:6], product, *EVENTS[7:])
    pairs = [
        (log(*EVENTS), [recorded((0, 2, 1002, 1010))]),
        (more, [recorded((0, 2, 502, 510))]),
        (more, [recorded((0, 100, 200, 300))]),  # too short for the host
    ]
    found = costs_on_device(pairs)
    assert found["host"] == 300 / 5
    assert found["product.float32"] == pytest.approx(1.0)


def test_costs_solve_all_equations() -> None:
    costs = {"call.forward": 1e-5, "bytes.float32": 1e-9, "product.float32": 1e-11}
    amounts = [(10, 0, 0), (10, 1e6, 0), (20, 2e6, 1e9), (5, 1e5, 2e9), (7, 3e6, 0)]
    parts = []
    for each in amounts:
        work = dict(zip(costs, each, strict=True))
        parts.append((work, sum(costs[unit] * amount for unit, amount in work.items())))
    found = solve(parts)
    assert {unit: found[unit] for unit in costs} == pytest.approx(costs)
    assert found["bytes.lookup"] == 0, "a unit that no part has costs nothing"


def test_nothing_costs_less_than_nothing() -> None:
    parts = [({"a": 1.0, "b": 1.0}, 1.0), ({"a": 1.0, "b": 2.0}, 0.5), ({"a": 2.0, "b": 1.0}, 2.0)]
    found = solve(parts)
    assert found["b"] == 0
    assert found["a"] == pytest.approx(0.9, rel=0.1)


@pytest.mark.parametrize("transport", ["auto", pytest.param("c10d", marks=pytest.mark.long)])
def test_a_rehearsal_has_the_work_of_a_small_training(transport: str) -> None:
    training = SmallTraining(64, 16, transport=transport)
    parts = work_of_parts(rehearse(training.blueprint(), training.settings(2)))
    names = {unit.partition(".")[0] for part in parts for unit in part}
    assert names >= {"call", "product", "attention", "bytes", "launch", "sent"}
    # Three layers and the root, forward and backward, and the optimizer.
    assert len(parts) == 2 * 4 + 1
    assert sum("product.float32" in part for part in parts) == 3 + 4


@pytest.mark.long
def test_a_machine_is_measured_alone_and_with_all_of_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "SHAPES", ((64, 16),))  # which measures nothing well
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(module, "STEPS", 2)
    said: list[str] = []
    found = measure_machine(said.append)
    assert said == ["one process alone", "2 at once"]
    assert list(found.costs) == [1, 2]
    path = tmp_path / "machine.json"
    found.save(path)
    assert Calibration.load(path) == found, "it has all that plans need"
    assert not found.machine(1).links
    assert found.machine(2).links.keys() >= {"gloo"}
    for costs in found.costs.values():
        assert any(costs.values()), "though most of so few tokens is too little to be told apart"
        assert all(cost >= 0 for cost in costs.values())
