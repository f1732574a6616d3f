"""A run's folder: nothing in it is lost by mistake."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from shardwise.app.recipes.core.rundir import RunDir, check_same, write_text
from shardwise.base.errors import UserError
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Existing, OutputConfig


def output(folder: Path, existing: Existing = Existing.REFUSE) -> OutputConfig:
    return OutputConfig(out=folder, existing=existing)


def a_run(folder: Path) -> RunDir:
    """A folder as a run leaves it, with a file of its user's beside."""
    files = RunDir(folder)
    files.begin(output(folder))
    files.write({"recipe": "lm"})
    for file in (files.metrics, files.root / "loss.png", files.sample):
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


@pytest.mark.parametrize("existing", [Existing.RESUME, Existing.OVERWRITE])
def test_a_run_in_which_a_folder_is_where_a_file_belongs_is_refused(
    tmp_path: Path, existing: Existing
) -> None:
    files = a_run(tmp_path)
    files.options.mkdir()
    with pytest.raises(
        OptionError, match=r"--out: found .*/config\.yaml, a folder, expected a fil"
    ):
        files.check(output(tmp_path, existing))


def outside(folder: Path) -> Path:
    """A folder with a file of its user's, which no run may delete."""
    folder.mkdir()
    (folder / "thesis.tex").write_text("years")
    return folder


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_overwriting_never_deletes_through_a_link_to_a_folder(tmp_path: Path, name: str) -> None:
    files = a_run(tmp_path / "run")
    (files.checkpoints / "step-00000001").rmdir()
    files.checkpoints.rmdir()
    (files.root / name).symlink_to(outside(tmp_path / "outside"))
    for refuse in (files.check, files.begin):
        with pytest.raises(OptionError, match=f"--out: found .*run/{name}, a symbolic link, expec"):
            refuse(output(files.root, Existing.OVERWRITE))
    assert (tmp_path / "outside" / "thesis.tex").exists()
    assert files.metrics.exists(), "nothing was deleted"


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "model.safetensors", "loss.png"])
def test_overwriting_never_deletes_a_link_to_a_file(tmp_path: Path, name: str) -> None:
    files = a_run(tmp_path / "run")
    (files.root / name).unlink(missing_ok=True)
    (tmp_path / "precious").write_text("{}")
    (files.root / name).symlink_to(tmp_path / "precious")
    for refuse in (files.check, files.begin):
        with pytest.raises(OptionError, match=f"--out: found .*/{name}, a symbolic link, expected"):
            refuse(output(files.root, Existing.OVERWRITE))
    assert (tmp_path / "precious").read_text() == "{}"
    assert (files.checkpoints / "step-00000001").exists(), "nothing was deleted"


def test_overwriting_never_follows_a_link_to_a_run(tmp_path: Path) -> None:
    files = a_run(tmp_path / "run")
    link = RunDir(tmp_path / "link")
    link.root.symlink_to(files.root)
    for refuse in (link.check, link.begin):
        with pytest.raises(OptionError, match=r"--out: found .*/link, a symbolic link, expected"):
            refuse(output(link.root, Existing.OVERWRITE))
    assert files.metrics.exists()
    link.check(output(link.root, Existing.RESUME))


def test_links_below_a_folder_that_is_deleted_lose_nothing_but_themselves(tmp_path: Path) -> None:
    files = a_run(tmp_path / "run")
    (files.checkpoints / "step-00000002").symlink_to(outside(tmp_path / "outside"))
    files.begin(output(files.root, Existing.OVERWRITE))
    assert not files.checkpoints.exists()
    assert (tmp_path / "outside" / "thesis.tex").exists()


def test_a_path_that_leaves_no_room_for_what_lies_in_a_run_is_refused(tmp_path: Path) -> None:
    long = Path(*["x" * 200] * 20)
    with pytest.raises(
        OptionError, match=r"--out: found a path that is too long, expected \d{4} b"
    ):
        RunDir(long).check(output(long))
    name = tmp_path / ("x" * 300)
    with pytest.raises(OptionError, match=r"--out: found .*cannot be used \(File name too long\)"):
        RunDir(name).check(output(name))


DAMAGED = {
    "": r"not valid JSON \(Expecting value: line 1",
    '{\n"recipe": "lm",\n': "not valid JSON .*line 3",
    "[]": "found list of 0, expected an object",
    "\0\0\0": "not valid JSON",
    '{"config": NaN}': "not valid JSON .*NaN",
    '{"recipe": 3}': "'recipe': found 3, expected a string",
    '{"recipe": "\\u001b[2J"}': "'recipe': found .*expected printable",
    '{"config": []}': "'config': found list of 0, expected an object",
    '{"model": 1}': "'model': found 1, expected an object",
    '{"model": {"settings": "x"}}': "'model', 'settings': found 'x', expected an object",
    '{"data": null}': "'data': found None, expected an object",
    '{"sessions": {}}': "'sessions': found dict of 0, expected a list",
    '{"sessions": [{}, 7]}': "session 2: found 7, expected an object",
    "[" * 100_000: "is nested too deeply",
}


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_run_json_is_named(tmp_path: Path, content: str) -> None:
    files = a_run(tmp_path)
    files.run_json.write_text(content)
    with pytest.raises(UserError, match=f"--out: .*run.json.*{DAMAGED[content]}") as caught:
        files.read()
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 400


def test_what_is_no_small_file_is_never_read(tmp_path: Path) -> None:
    files = a_run(tmp_path)
    with files.run_json.open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(UserError, match=r"--out: .*run.json: found '1,099,511,627,776 bytes'"):
        files.read()
    files.run_json.unlink()
    os.mkfifo(files.run_json)
    with pytest.raises(UserError, match="expected a regular file"):
        files.read()


def test_a_number_that_json_has_no_word_for_is_written_as_none(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    files.write({"sessions": [{"validation_loss": math.nan, "scores": (1.5, -math.inf)}]})
    assert files.read() == {"sessions": [{"validation_loss": None, "scores": [1.5, None]}]}


def test_settings_that_must_stay_are_compared() -> None:
    before = {"seq_length": 8, "train": {"seed": 1, "steps": 10}}
    names = {"seq_length": "--seq-length", "seed": "--seed"}
    check_same(before, {"seq_length": 8, "train": {"seed": 1, "steps": 20}}, names)
    with pytest.raises(OptionError, match="--seed: found 2, expected 1, as in the run to resume"):
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


@pytest.mark.parametrize("depth", [500, 100_000])
def test_a_record_that_is_nested_too_deeply_is_one_line(tmp_path: Path, depth: int) -> None:
    run = RunDir(tmp_path)
    run.run_json.write_text('{"x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(UserError, match=r"run\.json: is nested too deeply") as caught:
        run.read()
    assert str(caught.value).isprintable()


def no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_with_the_file_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = a_run(tmp_path)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=r"No space left on device: '.*/run\.json'"):
        files.write({"recipe": "another"})
    assert files.read() == {"recipe": "lm"}
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_deleted_while_a_run_trains_is_named(tmp_path: Path) -> None:
    files = a_run(tmp_path / "run")
    shutil.rmtree(files.root)
    with pytest.raises(UserError, match=r"--out: found no folder .*/run any more, expected the"):
        files.write({"recipe": "lm"})


def test_a_run_is_finished_once_its_last_session_is(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    for sessions, finished in (
        ([], False),
        ([{"status": "running"}], False),  # it was killed: its results are missing
        ([{"status": "stopped"}, {"status": "finished"}], True),
        ([{"status": "finished"}, {"status": "failed"}], False),
    ):
        files.write({"sessions": sessions})
        assert files.is_finished() is finished


def test_what_killed_runs_were_writing_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    for name in (".run.json.x1y2z3ab", ".config.json.x1y2z3ab", ".loss.png", "run.lock"):
        (tmp_path / name).touch()
    RunDir(tmp_path).check(OutputConfig(out=tmp_path))
    (tmp_path / ".thesis.txt").touch()
    with pytest.raises(OptionError, match="other files"):
        RunDir(tmp_path).check(OutputConfig(out=tmp_path))
