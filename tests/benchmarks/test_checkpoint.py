"""``benchmarks/checkpoint.py`` measures what it says, of contenders that load what they saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def test_the_table_shows_ratios_of_throughput() -> None:
    from _checkpoint_tables import checkpoint_tables

    def turns(save: float, load: float) -> list[dict[str, Any]]:
        turn = {"size": 8, "save_s": [save / 2, save], "load_s": [load, load / 3]}
        return [turn | {"save_extra": [0, 2**20], "load_extra": [0, 0]}] * 3

    seconds = {"ours": turns(2.0, 1.0), "dcp": turns(3.0, 4.0), "floor": turns(1.0, 0.5)}
    case = {"ranks": 2, "params": "34m", "nbytes": 4e9, "cold": False, "turns": seconds}
    [table] = checkpoint_tables({"cases": [case]})
    assert table.rows[0] == ["shardwise, save", "2.00", "2.00 to 2.00", "2.00", "1.50", "0.50", "1"]
    assert table.rows[3][4:6] == ["4.00", "0.50"]
    assert "in the page cache" in table.notes[0]
