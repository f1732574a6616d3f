"""``benchmarks/timeline.py`` compares recorded steps with others, and says what it costs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.scripts import call_script


def test_recorded_and_other_steps_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--transports", "shm", "--tokens", "8"]
    done = call_script(
        "timeline.py", *arguments, "--rounds", "2", "--steps", "1", "--json", str(path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [case] = json.loads(path.read_text())["cases"]
    assert len(case["turns"]) == 2
    for turn in case["turns"]:
        assert all(rank["spans"] > 20 and rank["bytes"] > 0 for rank in turn["on"])
        assert all("spans" not in rank for rank in turn["off"])
    assert "tiny, 2 ranks, shm" in done.stdout
