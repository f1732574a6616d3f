"""Curves are corrected by steps, and what is left of a step is attributed."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from shardwise.insight.planning import probe_steps
from shardwise.insight.planning.costs import FAMILIES, family_of
from shardwise.insight.planning.events import Op, StepPhase
from shardwise.insight.planning.machine import Curve, Link
from shardwise.insight.planning.probe_steps import (
    Clock,
    ProbeStep,
    Size,
    Sizes,
    corrected,
    ops_of,
    with_costs,
)

CURVE = Curve((100.0, 10_000.0), (1e-6, 1e-4))
CURVES = {f"{family}.{dtype}": CURVE for family in FAMILIES for dtype in ("float32", "bfloat16")}
SMALL, LARGE = Size(16, 8, layers=1), Size(32, 16, layers=1)
SIZES = Sizes(SMALL, SMALL, LARGE)
LINK = Link(name="test", bandwidth=1e9, latency=0.0, launch=0.0)


def in_place(nbytes: int) -> Op:
    return Op("aten.mul_.Tensor", "", StepPhase.OPTIMIZER, 0, nbytes, (), "float32", False)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Op, float]]:
    """What the operations of a step took."""
    found: list[tuple[Op, float]] = []

    def ops_in_steps(step: ProbeStep, steps: int, clock: Clock) -> list[tuple[Op, float]]:
        return found

    monkeypatch.setattr(probe_steps, "_ops_in_steps", ops_in_steps)
    return found


def test_a_curve_goes_through_what_operations_take_in_steps(timed: list[tuple[Op, float]]) -> None:
    timed += [(in_place(1000), 3e-5), (in_place(1000), 1e-5)]  # alone it takes 1e-5
    found = corrected(CURVES, torch.float32, SIZES, 1, time.perf_counter)
    assert found["in_place.float32"](1000) == pytest.approx(2e-5), "as long as both in the mean"
    assert found["in_place.float32"](100) == pytest.approx(2e-6), "and elsewhere by as much more"
    assert found["in_place.bfloat16"] == CURVE
    assert found["copy.float32"] == CURVE


def test_between_two_sizes_the_correction_is_interpolated(timed: list[tuple[Op, float]]) -> None:
    timed += [(in_place(100), 1e-6), (in_place(10_000), 4e-4)]
    curve = corrected(CURVES, torch.float32, SIZES, 1, time.perf_counter)["in_place.float32"]
    assert curve(1000) == pytest.approx(2e-5), "twice as long: halfway from once to four times"


def test_a_step_has_the_operations_of_a_transformer() -> None:
    ops = ops_of(ProbeStep(LARGE))
    assert {op.phase for op in ops} == {StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER}
    found = {family_of(op) for op in ops}
    assert {"product", "attention", "attention_backward", "adamw", "total_norm"} <= found
    assert all(op.nbytes for op in ops), "and nothing that touches no memory"


def test_collectives_cost_by_call_and_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(ProbeStep):
        """A step with as many bytes as its width."""

        def __init__(self, size: Size, transport: str) -> None:
            self.width = size.width

        def run(self, at: object = None) -> None:
            pass

    class Counter:
        calls = 10
        nbytes = 0

    counters = [Counter(), Counter()]
    for counter, nbytes in zip(counters, (1000, 9000), strict=True):
        counter.nbytes = nbytes
    times = {SMALL.width: 10 * 2e-3 + 1000 * 1e-6, LARGE.width: 10 * 2e-3 + 9000 * 1e-6}
    monkeypatch.setattr(probe_steps, "ProbeStep", Sharded)
    monkeypatch.setattr(probe_steps, "_Collectives", lambda: counters.pop(0))
    monkeypatch.setattr(probe_steps, "observing", lambda counter: contextlib.nullcontext())
    monkeypatch.setattr(probe_steps, "ops_of", lambda step: [])
    monkeypatch.setattr(probe_steps, "quick", lambda step, steps, clock: times[step.width])
    found = with_costs(LINK, "shm", CURVES, {}, SIZES, (1, 1), time.perf_counter)
    assert found.launch == pytest.approx(2e-3)
    assert found.host_cost == pytest.approx(1e-6)
