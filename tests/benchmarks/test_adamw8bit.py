"""``benchmarks/adamw8bit.py`` compares optimizers on the same gradients and the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import call_script


def test_optimizers_take_turns_and_train_on_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--rounds", "2", "--steps", "3", "--tokens", "256"]
    done = call_script("adamw8bit.py", *arguments, "--json", str(path))
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
