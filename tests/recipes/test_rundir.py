"""A run's folder: nothing in it is lost by mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.recipes.config import Existing, OptionError, OutputConfig
from shardwise.recipes.rundir import RunDir, check_same, write_text


def output(folder: Path, existing: Existing = Existing.REFUSE) -> OutputConfig:
    return OutputConfig(out=folder, existing=existing)


def a_run(folder: Path) -> RunDir:
    """A folder as a run leaves it, with a file of its user's beside."""
    files = RunDir(folder)
    files.begin(output(folder))
    files.write({"recipe": "lm"})
    for file in (files.metrics, files.picture, files.sample):
        file.write_text("x")
    (files.checkpoints / "step-00000001").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    return files


def test_a_new_or_empty_folder_is_fine(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new" / "deep"):
        RunDir(folder).check(output(folder))


def test_a_run_is_not_overwritten_unless_asked(tmp_path: Path) -> None:
    files = a_run(tmp_path)
    with pytest.raises(OptionError, match=r"--out: found a run in .* already, expected another"):
        files.check(output(tmp_path))
    files.check(output(tmp_path, Existing.RESUME))
    files.check(output(tmp_path, Existing.OVERWRITE))


def test_overwriting_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    files = a_run(tmp_path)
    files.begin(output(tmp_path, Existing.OVERWRITE))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_with_other_files_is_never_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    for existing in (Existing.REFUSE, Existing.OVERWRITE):
        with pytest.raises(OptionError, match="--out: found other files in"):
            RunDir(tmp_path).check(output(tmp_path, existing))
    RunDir(tmp_path).begin(output(tmp_path, Existing.OVERWRITE))
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"--out: found .*file, which is a file"):
        RunDir(tmp_path / "file").check(output(tmp_path / "file"))


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--resume: found no run in"):
        RunDir(tmp_path).check(output(tmp_path, Existing.RESUME))


def test_a_damaged_run_json_is_named(tmp_path: Path) -> None:
    files = a_run(tmp_path)
    for content in ("{", "[]"):
        files.run_json.write_text(content)
        with pytest.raises(OptionError, match=r"--out: found .*run.json"):
            files.read()


def test_settings_that_must_stay_are_compared() -> None:
    before = {"seq_length": 8, "train": {"seed": 1, "steps": 10}}
    names = {"seq_length": "--seq-length", "seed": "--seed"}
    check_same(before, {"seq_length": 8, "train": {"seed": 1, "steps": 20}}, names)
    with pytest.raises(OptionError, match="--seed: found 2, expected 1, as the run began"):
        check_same(before, {"seq_length": 8, "train": {"seed": 2, "steps": 10}}, names)


def test_a_small_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")  # fails after the file was opened
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"
    write_text(path, json.dumps({"a": 1}))
    assert json.loads(path.read_text()) == {"a": 1}
