"""``benchmarks/checkpoint_stall.py`` measures what it says, in turns that all save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import call_script

on_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks come from Linux's /proc"
)


@pytest.mark.long
@on_linux
def test_every_way_saves_in_every_turn(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--rounds", "2", "--steps", "2", "--tokens", "8"]
    done = call_script(
        "checkpoint_stall.py", *arguments, "--folder", str(tmp_path), "--json", str(path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch DCP, async_save" in done.stdout
    [case] = json.loads(path.read_text())["cases"]
    for way in ("steps", "sync", "async", "dcp"):
        assert len(case["turns"][way]) == 2
        for rank in (rank for turn in case["turns"][way] for rank in turn):
            assert 0 <= rank["stall"] < rank["seconds"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"], "it cleans up"
