"""A second run without --out takes a folder of its own; what is there stays as it is.

Which folder goes with which options, tests/recipes/test_job.py shows.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.app.cli import run as cli_run
from shardwise.app.recipes.core.job import free_folder, newest_folder
from shardwise.app.recipes.core.rundir import RunDir, locked
from tests.cli.shell import call

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("no_world")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that ranks would have trained into, in place of starting them."""
    folders: list[Path] = []

    def run_job(command: Callable[[int], list[str]], *_: object) -> int:
        job, words = pickle.loads(Path(command(0)[-1]).read_bytes())
        out = job.config.train.output.out
        folders.append(out)
        assert ("--out" in words) == (out != Path("runs/lm")), "shown as what goes on with it"
        return 0

    monkeypatch.setattr(cli_run, "run_job", run_job)
    return folders


def make_run(folder: str) -> bytes:
    """A folder that a run has begun in."""
    Path(folder).mkdir(parents=True)
    RunDir(Path(folder)).write({"recipe": "lm", "sessions": []})
    return Path(folder, "run.json").read_bytes()


def test_a_second_run_takes_the_next_number_and_says_so(
    capsys: Capture, started: list[Path]
) -> None:
    assert call("train", "lm", "--steps", "3") == 0
    assert started == [Path("runs/lm")], "the default folder is free"
    before = make_run("runs/lm-2"), make_run("runs/lm-3")
    (Path("runs/lm") / "run.json").write_text("{}")
    capsys.readouterr()
    assert call("train", "lm", "--steps", "3") == 0
    assert started[1] == Path("runs/lm-4")
    line = "run        runs/lm-4; runs/lm has a run; --resume --out runs/lm continues it"
    assert line in capsys.readouterr().out.splitlines()
    assert before == tuple(Path(f"runs/lm-{n}/run.json").read_bytes() for n in (2, 3))


def test_several_hosts_share_one_folder_that_none_of_them_counts_up(capsys: Capture) -> None:
    make_run("runs/lm")
    hosts = ["--nnodes", "2", "--node-rank", "0", "--rdzv", "here:99"]
    assert call("train", "lm", *hosts) == 2
    assert "--out: found a run in runs/lm already" in capsys.readouterr().err


def test_ranks_of_a_world_that_is_there_agree_on_the_default_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Under torchrun each rank reads the command line for itself, at another time."""
    make_run("runs/lm")
    jobs: list[Path] = []
    monkeypatch.setattr(
        cli_run, "run_rank", lambda world, train: jobs.append(train.__self__) or sys.exit(0)
    )
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert call("train", "lm") == 0
    assert jobs[0].config.train.output.out == Path("runs/lm")  # type: ignore[attr-defined]


def test_a_folder_is_free_without_a_run_a_file_or_a_lock_that_is_held(tmp_path: Path) -> None:
    default = tmp_path / "lm"
    assert free_folder(default) == default
    default.mkdir()
    assert free_folder(default) == default, "empty"
    with locked(RunDir(default)):
        assert free_folder(default) == tmp_path / "lm-2", "a run is about to begin there"
    assert free_folder(default) == default, "a lock that nobody holds"
    (default / "thesis.tex").touch()
    (tmp_path / "lm-2").write_text("a file, no folder")
    assert free_folder(default) == tmp_path / "lm-3"


def test_the_newest_run_is_the_last_number_that_has_one(tmp_path: Path) -> None:
    default = tmp_path / "lm"
    assert newest_folder(default) == default
    make_run(str(default))
    make_run(str(tmp_path / "lm-2"))
    (tmp_path / "lm-3").mkdir()
    (tmp_path / "lm-3" / "notes.txt").touch()
    assert newest_folder(default) == tmp_path / "lm-2"
