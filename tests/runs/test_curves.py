"""Curves of any length in a bounded number of points."""

from __future__ import annotations

import math
import random

from shardwise.runs.snapshot import MOST_NAMES, Curves


def test_few_steps_are_kept_as_they_are() -> None:
    curves = Curves(points=10)
    for step in range(1, 11):
        curves.add(step, {"loss": 1 / step})
    found = curves.to_json()
    assert (found["steps"], found["width"]) == (list(range(1, 11)), 1)
    assert set(found["values"]["loss"]) == {"mean"}
    assert found["values"]["loss"]["mean"][2] == 0.333333


def test_many_steps_keep_their_mean_and_every_spike() -> None:
    values = [random.Random(7).random() for _ in range(5000)]
    values[3210] = 1e6
    curves = Curves(points=100)
    for step, value in enumerate(values):
        curves.add(step, {"loss": value})
    found = curves.to_json()
    width, loss = found["width"], found["values"]["loss"]
    assert 50 <= len(found["steps"]) <= 100
    for at in range(len(found["steps"])):
        part = values[at * width : (at + 1) * width]
        assert found["steps"][at] == at * width + len(part) - 1
        assert math.isclose(loss["mean"][at], sum(part) / len(part), rel_tol=1e-4)
        assert math.isclose(loss["low"][at], min(part), rel_tol=1e-4)
        assert math.isclose(loss["high"][at], max(part), rel_tol=1e-4)
    assert max(loss["high"]) == 1e6


def test_an_evaluation_joins_its_step_and_leaves_gaps_elsewhere() -> None:
    curves = Curves()
    for step in (1, 2, 3):
        curves.add(step, {"loss": float(step)})
    curves.add(2, {"validation_loss": 9.0})
    values = curves.to_json()["values"]
    assert values["validation_loss"]["mean"] == [None, 9.0, None]


def test_what_is_no_finite_number_is_a_gap() -> None:
    curves = Curves()
    curves.add(1, {"loss": math.nan, "lr": 1.0})
    curves.add(2, {"loss": math.inf, "lr": 2.0})
    curves.add(3, {"loss": None, "lr": 3.0})
    curves.add(4, {"loss": 4.0})
    found = curves.to_json()
    values = found["values"]
    assert found["not_finite"] == {"loss": [3, 1]}
    assert values["loss"]["mean"] == [None, None, None, 4.0]
    assert values["lr"]["mean"] == [1.0, 2.0, 3.0, None]


def test_a_damaged_file_can_neither_ask_for_memory_nor_for_time() -> None:
    curves = Curves(points=10)
    for power in range(62):
        curves.add(2**power, {"loss": 1.0})
    assert len(curves.to_json()["steps"]) <= 10
    for number in range(2 * MOST_NAMES):
        curves.add(1, {f"name {number}": 1.0})
    assert len(curves.to_json()["values"]) == MOST_NAMES
