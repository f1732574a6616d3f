"""``--timeline``: some steps of a training are recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise import timeline
from shardwise.app.recipes.core.recipe import PLAN_FILE
from shardwise.app.recipes.core.timeline_of_run import PREDICTION, TimelineOfRun, read_prediction
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base import plain
from shardwise.base.observe import Activity, is_observed
from shardwise.insight import program
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import steps_to_record
from shardwise.timeline import recording
from tests.recipes.running import train
from tests.recipes.small import small_config
from tests.timeline.test_trace import PREDICTION as PREDICTED


@pytest.mark.parametrize(
    ("asked", "done", "left", "steps"),
    [
        ("5-8", 0, 100, [5, 6, 7, 8]),
        ("5-8", 100, 100, [5, 6, 7, 8]),
        ("3", 0, 100, [3]),
        ("auto", 0, 100, [5, 6, 7, 8]),
        ("auto", 100, 100, [105, 106, 107, 108]),
        ("auto", 0, 6, [3, 4, 5, 6]),
        ("auto", 0, 2, [1, 2]),
        ("auto", 10, 0, []),
    ],
)
def test_steps_are_those_that_are_asked_for(
    asked: str, done: int, left: int, steps: list[int]
) -> None:
    assert list(steps_to_record(asked, done, left)) == steps


@pytest.mark.parametrize("asked", ["", "-", "5-", "-8", "8-5", "0-3", "5..8", "all", "5-8-9", "²"])
def test_anything_else_is_refused_before_a_training_starts(asked: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--timeline"):
        small_config(tmp_path, timeline=asked).train.check_values()


def test_a_training_records_its_steps(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    config = small_config(tmp_path, timeline="2-3", steps=4)
    assert ranks(train, 2, config) == [["finished"]] * 2
    folder = tmp_path / "run" / "timeline"
    found = timeline.read(folder)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert [step.number for step in found.steps] == [2, 3]
    for rank in found.ranks:
        assert {"the gradient norm", "the exchange of losses and signals"} <= {
            span.name for span in rank.spans if span.activity is Activity.WAIT
        }
    assert {path.name for path in folder.iterdir()} == {
        *("timeline.html", "timeline.json", "trace.json"),
    }


def test_a_training_that_ends_early_keeps_what_it_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    with TimelineOfRun(range(1, 9), tmp_path, said.append) as recorded, recorded.step(1):
        assert is_observed()
    assert [step.number for step in timeline.read(tmp_path).steps] == [1]
    assert said[0].startswith("timeline   a step takes ")
    assert said[1] == f"timeline   {tmp_path}"
    assert not is_observed()


def test_a_training_that_fails_leaves_what_it_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    recorded = TimelineOfRun(range(1, 9), tmp_path, said.append)
    with pytest.raises(ValueError, match="diverged"), recorded, recorded.step(1):
        raise ValueError("it diverged")
    assert timeline.read(tmp_path).ranks[0].error == "ValueError: it diverged"
    assert not is_observed()


def _diverge(rank: int, world_size: int, config: LmConfig) -> list[str]:
    """Train until the gradient norm is not finite; say how, and what run.json said before."""
    record = config.train.output.out / "run.json"
    said: list[str] = []

    def leave(mine: timeline.Timeline, folder: Path) -> None:
        if rank == 0:
            said.append(json.loads(record.read_text())["sessions"][-1]["status"])

    with (
        mock.patch.object(program, "clip_grad_norm_", return_value=torch.tensor(math.nan)),
        mock.patch.object(recording, "leave", leave),
    ):
        return [*train(rank, world_size, config), *said]


def test_a_failure_is_recorded_before_the_timeline_is_written(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    config = small_config(tmp_path, timeline="1-3", steps=4)
    (ended, status), _ = ranks(_diverge, 2, config)
    assert ended.startswith("DivergedError")
    assert status == "failed"


def test_steps_that_were_not_asked_for_are_not_watched(tmp_path: Path) -> None:
    with TimelineOfRun(range(2, 3), tmp_path, print) as recorded:
        for number in (1, 2, 3):
            with recorded.step(number):
                assert is_observed() is (number == 2)


def test_the_prediction_of_a_plan_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PLAN_FILE, raising=False)
    assert read_prediction() is None
    monkeypatch.setenv(PLAN_FILE, str(tmp_path / "plan.json"))
    assert read_prediction() is None
    (tmp_path / PREDICTION).write_bytes(plain.written(PREDICTED))
    assert read_prediction() == PREDICTED
    (tmp_path / PREDICTION).write_text("{")
    assert read_prediction() is None
