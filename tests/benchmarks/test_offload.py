"""``benchmarks/offload.py`` compares equal trainings, one of which is short of memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script

CASE: dict[str, Any] = {
    "ranks": 2,
    "params": "tiny",
    "numel": 1_000_000,
    "tokens": 64,
    "staging": 2**20,
    "limits": {"disk": 2**20, "all": 2**19},
    "kept": 3 * 2**20,
    "seconds": {"memory": [1.0, 2.0, 3.0], "disk": [2.0, 2.5, 4.0], "all": [1.0, 2.0, 4.0]},
    "digests": {name: ["a", "b"] for name in ("memory", "disk", "all")},
    "peak": {"memory": 4 * 2**20, "disk": 2**20, "all": 2**19},
}


def test_the_speed_is_the_median_of_what_turns_show() -> None:
    from _offload_tables import offload_tables, speed, wrong

    assert speed(CASE, "disk") == 0.75  # of 0.5, 0.8 and 0.75
    assert wrong(CASE) is None
    [table] = offload_tables({"cases": [CASE]})
    assert [row[4] for row in table.rows] == ["1.00", "0.75", "1.00"]
    assert "3.0 x as much" in table.notes[0]
    assert f"{(3 * 2**20 + 2_000_000) / 2**19:.1f} x as much" in table.notes[0]


def test_what_is_slow_or_differs_is_told() -> None:
    from _offload_tables import wrong

    slow = {**CASE, "seconds": {"memory": [1.0], "disk": [2.0], "all": [1.0]}}
    assert wrong(slow) == "states on a disk: 0.50 x the speed with everything in memory"
    differs = {**CASE, "digests": {**CASE["digests"], "all": ["b"]}}
    assert wrong(differs) == "states and parameters on a disk: parameters differ"


@pytest.mark.long
@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="needs control groups")
def test_all_take_turns_within_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    done = call_script(
        "offload.py",
        *("--params", "tiny", "--tokens", "32", "--times", "0.003", "--rounds", "2"),
        *("--folder", str(tmp_path), "--json", str(path)),
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # the speed is nobody's business
    [case] = json.loads(path.read_text())["cases"]
    assert {name: len(each) for name, each in case["seconds"].items()} == dict.fromkeys(
        ("memory", "disk", "all"), 2
    )
    assert case["digests"]["memory"] == case["digests"]["disk"] == case["digests"]["all"]
    assert case["kept"] > 0
    for name, limit in case["limits"].items():
        assert case["peak"][name] <= limit
