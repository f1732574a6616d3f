"""``benchmarks/checkpoint.py`` measures what it says, of contenders that load what they saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import call_script

on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks come from Linux's /proc"
)


@on_linux
@pytest.mark.long
def test_every_contender_saves_and_loads_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--rounds", "2", "--folder", str(tmp_path), "--cold"]
    done = call_script("checkpoint.py", *arguments, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    for title in ("shardwise, save", "torch DCP, load", "plain files, save"):
        assert title in done.stdout
    [case] = json.loads(path.read_text())["cases"]
    assert case["cold"] is True
    for name in ("ours", "dcp", "floor"):
        assert len(case["turns"][name]) == 2
        for turn in case["turns"][name]:
            assert turn["size"] >= case["nbytes"], f"{name} left something out"
            assert all(seconds > 0 for seconds in turn["save_s"] + turn["load_s"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"], "it cleans up"
