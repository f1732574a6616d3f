"""``benchmarks/adamw8bit.py`` compares optimizers on the same gradients and the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script


def test_optimizers_take_turns_and_train_on_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--rounds", "2", "--steps", "3", "--tokens", "256"]
    picture = tmp_path / "curves.svg"
    outputs = ("--json", str(path), "--picture", str(picture))
    done = call_script("adamw8bit.py", *arguments, *outputs)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, losses = json.loads(path.read_text())["cases"]
    assert all(len(turns) == 2 for turns in steps["seconds"].values())
    held = steps["state_bytes"]
    assert held["ours"] < 0.3 * held["adamw"]
    curves = losses["losses"]
    assert curves["adamw"][0] == curves["ours"][0], "the same weights and batch"
    assert curves["ours"] == pytest.approx(curves["adamw"], rel=1e-3)
    for title in ("torch AdamW, fused", "shardwise AdamW8bit", "torch AdamW, foreach"):
        assert title in done.stdout
        assert title in picture.read_text()


def test_a_training_goes_on_where_it_was_kept(tmp_path: Path) -> None:
    def losses(steps: int, *arguments: str) -> Any:
        path = tmp_path / "raw.json"
        always = ("--only", "loss", "--params", "tiny", "--contenders", "adamw,ours")
        done = call_script(
            "adamw8bit.py",
            *(*always, "--tokens", "256", "--seeds", "2", "--steps", str(steps)),
            *(*arguments, "--json", str(path)),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [case["losses"] for case in json.loads(path.read_text())["cases"]]

    folder = tmp_path / "kept"
    at_once, first = losses(4), losses(2, "--folder", str(folder))
    assert losses(4, "--folder", str(folder)) == at_once
    assert [case["ours"] for case in first] == [case["ours"][:2] for case in at_once]
    assert at_once[0] != at_once[1], "another seed"
    journal = (folder / "losses.jsonl").read_text().splitlines()
    assert len(journal) == 2 * 2 * 4, "nothing was done again"
