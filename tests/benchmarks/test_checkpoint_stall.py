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


def test_the_table_shows_medians_of_shares_within_rounds() -> None:
    from _checkpoint_stall_tables import stall_tables

    def turns(stall: float, seconds: float, peak: float) -> list[list[dict[str, float]]]:
        slow = {"stall": stall, "seconds": seconds, "peak": peak}
        return [[{"stall": 0.0, "seconds": 0.0, "peak": 0.0}, slow]] * 3

    found = {
        "steps": turns(0.0, 4.0, 2**20),
        "sync": turns(2.0, 6.0, 2**20),
        "async": turns(0.5, 5.0, 3 * 2**20),
        "dcp": turns(1.0, 4.5, 0.0),
    }
    case = {"ranks": 2, "params": "34m", "numel": 1e9, "tokens": 8, "steps": 3, "turns": found}
    [table] = stall_tables({"cases": [case]})
    assert table.rows[1] == [
        *("shardwise, async_save", "0.50", "0.50 to 0.50", "0.25"),
        *("1.00", "1.00 to 1.00", "2"),
    ]
    assert "12.00 GB" in table.title
    assert "take 4.00 s alone" in table.notes[0]
