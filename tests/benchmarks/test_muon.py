"""``benchmarks/muon.py`` compares steps that compute the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.scripts import call_script


def test_ours_and_whole_matrices_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--ranks", "2", "--rounds", "2", "--ns-steps", "1"]
    done = call_script("muon.py", *arguments, "--contenders", "ours,every", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    [case] = json.loads(path.read_text())["cases"]
    assert {name: len(each) for name, each in case["seconds"].items()} == {"ours": 2, "every": 2}
    assert case["difference"] <= 1e-5
    assert "tiny" in done.stdout
