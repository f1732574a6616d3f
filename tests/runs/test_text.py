"""Runs beside each other, as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.app.cli.watch import compared
from shardwise.runs.snapshot import RunReader
from tests.runs import folders


def test_what_differs_is_listed_and_the_rest_is_counted(tmp_path: Path) -> None:
    one = folders.make(tmp_path / "one")
    other = folders.make(
        tmp_path / "other",
        config={"model": "llama-tiny", "train": {"steps": 200, "optimizer": {"lr": 0.1}}},
        sessions=[folders.session(status="failed", world_size=4)],
    )
    found = compared([RunReader(root).read() for root in (one, other)])
    assert dict(found.differing) == {"train.optimizer.lr": [0.002, 0.1]}
    assert found.same == 2
    lines = [line.split() for line in str(found).splitlines()]
    assert ["train.optimizer.lr", "0.002", "0.1"] in lines
    assert ["state", "finished", "failed"] in lines
    assert ["ranks", "2", "4"] in lines
    result = json.loads(json.dumps(vars(found)))["results"]["one"]
    assert (result["step"], result["state"]) == (200, "finished")
    assert abs(result["best validation_loss"] - 2.047) < 0.01


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    roots = [folders.make(tmp_path / name / "lm") for name in ("a", "b")]
    found = compared([RunReader(root).read() for root in roots])
    assert list(found.results) == [str(root) for root in roots]
    assert "settings are the same" in str(found)


def test_what_a_run_says_cannot_control_a_terminal(tmp_path: Path) -> None:
    root = folders.make(tmp_path / "lm", model={"name": "\x1b[2J" + "x" * 500})
    shown = str(compared([RunReader(root).read()] * 2))
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) < 250
