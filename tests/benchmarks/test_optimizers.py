"""``benchmarks/optimizers.py`` compares optimizers on sharded models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script


def test_contenders_take_turns_and_train_on_the_same_text(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    words = "--params tiny --rounds 2 --steps 2 --contenders ours-adamw,fsdp2-adamw --json"
    done = call_script("optimizers.py", *words.split(), str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    steps, loss = json.loads(path.read_text())["cases"]
    assert [len(turns) for turns in steps["seconds"].values()] == [2, 2]
    for name, by_rank in steps["state_bytes"].items():
        numel = steps["shard_numel"][name]
        assert sum(numel) == steps["numel"]
        assert by_rank == pytest.approx([8 * each for each in numel], rel=0.01)
        assert all(taken >= 0 for taken in steps["step_bytes"][name])
    assert len(loss["losses"]["ours-adamw"]) == 2
    assert loss["losses"]["ours-adamw"] == loss["losses"]["fsdp2-adamw"]
    assert done.stdout.count("torch AdamW, fused") == 4, "a row for each, in both tables"


def test_losses_that_differ_between_runtimes_are_an_error() -> None:
    from _measured import optimizer_differences as differences

    losses = {"ours-sgd": [2.0, 1.5], "fsdp2-sgd": [2.0, 1.5], "ours-lion": [2.0]}
    case: dict[str, Any] = {"part": "loss", "ranks": 2, "losses": losses}
    assert not differences(case)
    losses["ours-sgd"] = [2.0, 1.4]
    assert differences(case) == ["sgd"]


def test_ranks_share_a_batch_evenly() -> None:
    done = call_script("optimizers.py", "--ranks", "3", "--tokens", "512")
    assert done.returncode == 2
    assert "--tokens: expected a multiple of 768, 256 a rank" in done.stderr
