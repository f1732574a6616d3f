"""``benchmarks/diloco.py`` trains what it says, and counts every byte between replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.scripts import call_script

PARAMETERS = 920_704  # of llama-tiny


@pytest.mark.long
def test_bytes_are_counted_alike_for_both(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--start", "1", "--steps", "4", "--every", "3", "--batch", "1", "--length", "16"]
    done = call_script("diloco.py", *arguments, "--contenders", "int8", "--json", str(path))
    assert done.returncode == 1, f"it keeps no promises in four steps: {done.stdout}{done.stderr}"
    [case] = json.loads(path.read_text())["cases"]
    found = case["contenders"]
    assert case["settings"]["steps"] == 4
    # Two ranks, each of which sends a half of its vector twice.
    assert found["synchronous"]["sent"] == 2 * 4 * 4 * PARAMETERS
    assert found["synchronous"]["sent_at_end"] == 0
    for name in ("sent", "sent_at_end"):  # one exchange after three steps, one at the end
        assert found["int8"][name] == pytest.approx(2 * PARAMETERS * (1 + 4 / 256), rel=1e-3)
    assert all(4 < each["judged"] < 7 for each in found.values())
    assert f"{2 * 4 * 4 * PARAMETERS / 1e6:.2f}" in done.stdout
