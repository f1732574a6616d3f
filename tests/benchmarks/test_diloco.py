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


def test_the_table_shows_losses_and_bytes_beside_synchronous_training() -> None:
    from _diloco_tables import diloco_tables

    def figures(judged: float, sent: int) -> dict[str, float]:
        return {"sent": sent, "sent_at_end": 0, "judged": judged, "seconds": 9.4, "last_losses": 1}

    outer = {"outer_lr": 0.7, "outer_warmup": 2}
    settings = {
        "model": "m",
        "ranks": 2,
        "replicas": 2,
        "steps": 100,
        "every": 50,
        "start": 0,
        **outer,
    }
    contenders = {"synchronous": figures(2.0, 8_000_000), "int8:0.5": figures(2.02, 40_000)}
    case = {"settings": {**settings, "batch": 4, "length": 128}, "contenders": contenders}
    [table] = diloco_tables({"cases": [case]})
    assert table.title.endswith("outer rate 0.7, momentum rises over 2 rounds")
    assert table.rows == [
        ["synchronous", "2.0000", "1.0000", "8.00", "1.0 x"],
        ["DiLoCo, H = 50, int8, momentum 0.5", "2.0200", "1.0100", "0.04", "200.0 x"],
    ]
