"""A job that is started again: it goes on with what it has begun, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.launch.world import JOB, PARENT_PID
from shardwise.recipes.core.begin import decided
from shardwise.recipes.core.config import Existing, OutputConfig
from shardwise.recipes.core.journal import RunRecord
from shardwise.recipes.core.rundir import RunDir


@pytest.fixture(autouse=True)
def rank_of_this_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT_PID, str(os.getppid()))
    monkeypatch.setenv(JOB, "this job")


def begin(files: RunDir, monkeypatch: pytest.MonkeyPatch, job: str | None = None) -> None:
    """Begin a run, or go on with it, as a job that is not ended by what comes next."""
    with monkeypatch.context() as env:
        if job is not None:
            env.setenv(JOB, job)
        RunRecord(files, {"recipe": "lm"}, {})


def save(files: RunDir) -> None:
    (files.checkpoints / "step-00000004").mkdir(parents=True)


def after_restart(files: RunDir, existing: Existing) -> Existing:
    return decided(OutputConfig(out=files.root, existing=existing)).existing


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.RESUME, Existing.OVERWRITE])
def test_a_run_of_another_job_is_not_taken_for_the_one_that_never_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing
) -> None:
    """``--overwrite`` of a job whose ranks died before they began still deletes the old run."""
    files = RunDir(tmp_path)
    assert after_restart(files, existing) is existing
    begin(files, monkeypatch, "another job")
    save(files)
    assert after_restart(files, existing) is existing


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.RESUME, Existing.OVERWRITE])
def test_what_this_job_has_saved_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: Existing
) -> None:
    files = RunDir(tmp_path)
    begin(files, monkeypatch, "the job before")
    begin(files, monkeypatch)
    save(files)
    assert after_restart(files, existing) is Existing.RESUME


def test_a_run_that_this_job_began_and_never_saved_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDir(tmp_path)
    begin(files, monkeypatch)
    assert after_restart(files, Existing.REFUSE) is Existing.OVERWRITE


def test_a_damaged_record_is_overwritten_as_asked(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    files.run_json.write_text("{")
    save(files)
    assert after_restart(files, Existing.OVERWRITE) is Existing.OVERWRITE


def test_what_no_job_began_belongs_to_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PARENT_PID)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    files = RunDir(tmp_path)
    begin(files, monkeypatch)
    save(files)
    assert files.read()["sessions"][0]["job"] is None
    assert after_restart(files, Existing.OVERWRITE) is Existing.OVERWRITE
