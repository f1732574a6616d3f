"""What rank 0 records: metrics, events for TensorBoard, and one session for each start."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.app.recipes.core.checkpointing import Best
from shardwise.app.recipes.core.journal import (
    FileJournal,
    Journal,
    RunRecord,
    StepMetrics,
    command_line,
    surroundings,
)
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.core.sinks import TensorBoard
from shardwise.runs.metrics_file import read_metrics


def metrics(step: int, **changes: Any) -> StepMetrics:
    values = {"loss": 2.5, "grad_norm": 1.0, "lr": 0.1, "units_per_s": 64.0, "memory_mib": 9.0}
    return StepMetrics(step=step, eta_s=30.0, **{**values, **changes})


def record_of(files: RunDir) -> RunRecord:
    """A run that has just begun."""
    return RunRecord(files, {}, {})


class Events:
    """TensorBoard's writer, which takes seconds to import."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.calls: list[str] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Events]:
    """The writers that were made."""
    made: list[Events] = []

    def make(folder: str, purge_step: int) -> Events:
        made.append(Events(folder, purge_step))
        return made[-1]

    module = SimpleNamespace(SummaryWriter=make)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)  # type: ignore[arg-type]
    return made


# -- metrics ---------------------------------------------------------------------------------------


def test_steps_and_evaluations_are_lines_that_can_be_read_at_once(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    journal = FileJournal(files, record_of(files), "images", 0)
    journal.step(metrics(1, epoch=0.5))
    journal.evaluated(1, {"validation_loss": 2.0, "accuracy": 0.25})
    step, evaluation = read_metrics(files.metrics)
    assert (step["step"], step["images_per_s"], step["epoch"]) == (1, 64.0, 0.5)
    assert "mfu" not in step, "a value that is not known is left out"
    assert evaluation == {"step": 1, "validation_loss": 2.0, "accuracy": 0.25}
    journal.close()
    assert not files.tensorboard.exists()


def test_a_resumed_run_replaces_the_steps_behind_its_checkpoint(
    tmp_path: Path, events: list[Events]
) -> None:
    files = RunDir(tmp_path)
    for done, loss in ((0, 5.0), (2, 1.0)):
        journal = FileJournal(
            files, record_of(files), "images", done, [TensorBoard(files.tensorboard, done)]
        )
        for step in range(done + 1, 5):
            journal.step(metrics(step, loss=loss))
        journal.close()
    assert [record["loss"] for record in read_metrics(files.metrics)] == [5.0, 5.0, 1.0, 1.0]
    assert [each.purge_step for each in events] == [1, 3], "TensorBoard drops them as well"
    assert {each.folder for each in events} == {str(files.tensorboard)}


def test_tensorboard_gets_what_can_be_drawn(tmp_path: Path, events: list[Events]) -> None:
    files = RunDir(tmp_path)
    sinks = [TensorBoard(files.tensorboard, 0)]
    journal = FileJournal(files, record_of(files), "tokens", 0, sinks)
    journal.step(metrics(7, mfu=0.5))
    journal.evaluated(7, {"validation_loss": 2.0})
    journal.saved()
    journal.close()
    (written,) = events
    assert {step for _, _, step in written.scalars} == {7}
    values = {name: value for name, value, _ in written.scalars}
    assert values["tokens_per_s"] == 64.0
    assert values["mfu"] == 0.5
    assert values["validation_loss"] == 2.0
    assert not {"step", "eta_s"} & set(values), "neither is a curve"
    assert written.calls == ["flush", "close"]


def test_metrics_are_on_disk_before_a_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    files = RunDir(tmp_path)
    journal = FileJournal(files, record_of(files), "tokens", 0)
    synced.clear()
    journal.step(metrics(1))
    assert synced == [], "a step does not wait for the disk"
    journal.saved()
    assert synced == [RunDir(tmp_path).metrics.stat().st_ino]
    journal.close()


def test_the_best_checkpoint_is_named_and_stays_named(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    record = record_of(files)
    journal = FileJournal(files, record, "tokens", 0)
    journal.best(Best(4, 2.5))
    journal.best(Best(6, 1.5))
    journal.close()
    record.end("finished")
    assert files.read()["best"] == {"step": 6, "validation_loss": 1.5}


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal()
    journal.step(metrics(1))
    journal.evaluated(1, {"validation_loss": 2.0})
    journal.saved()
    journal.best(Best(1, 2.0))
    journal.failed(ValueError("it diverged"))
    assert list(tmp_path.iterdir()) == []


# -- run.json --------------------------------------------------------------------------------------


def test_a_session_names_who_was_lost_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDir(tmp_path)
    RunRecord(files, {}, {})
    monkeypatch.setenv("SHARDWISE_LOST", "rank 1 was killed by SIGKILL")
    RunRecord(files, {}, {})
    first, second = files.read()["sessions"]
    assert "lost" not in first
    assert second["lost"] == "rank 1 was killed by SIGKILL"


def test_every_start_is_a_session_and_the_facts_are_those_of_the_last(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    first = RunRecord(files, {"recipe": "lm", "config": {"steps": 5}}, {"world_size": 2})
    assert files.read()["sessions"][0]["status"] == "running"
    assert not files.is_finished()
    first.end("stopped", step=3)
    second = RunRecord(files, {"recipe": "lm", "config": {"steps": 9}}, {"world_size": 4})
    second.end("finished", validation_loss=1.5, accuracy=math.nan)
    record = files.read()
    assert record["config"] == {"steps": 9}
    stopped, finished = record["sessions"]
    assert (stopped["status"], stopped["world_size"], stopped["step"]) == ("stopped", 2, 3)
    assert (finished["status"], finished["world_size"]) == ("finished", 4)
    assert (finished["validation_loss"], finished["accuracy"]) == (1.5, None)
    assert stopped["started"] <= stopped["ended"] <= finished["started"] <= finished["ended"]
    assert files.is_finished()


def test_a_session_says_how_it_was_started_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/shardwise", "train", "lm", "--data", "my text"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = surroundings()
    assert found["command"] == "shardwise train lm --data 'my text'"
    assert found["host"]["threads_per_rank"] == "3"
    assert found["versions"]["python"].split(".")[0] == str(sys.version_info.major)
    assert set(found["versions"]) == {"python", "shardwise", "torch", "transformers", "numpy"}


def test_a_command_can_be_pasted_into_a_shell() -> None:
    assert command_line([]) == "shardwise"
    assert command_line(["--out", "a b", "$HOME", "*.txt"]) == (
        "shardwise --out 'a b' '$HOME' '*.txt'"
    )
