"""``benchmarks/loading.py`` compares contenders that load the same, and says what is too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script

on_linux = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="peaks come from Linux's /proc"
)


@on_linux
@pytest.mark.long
def test_contenders_load_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import loading

    # Those of others need seconds each, to import and to start.
    monkeypatch.setattr(loading, "CONTENDERS", ("ours", "floor"))
    monkeypatch.setattr(loading, "loading_tables", lambda content: [_Silent()])
    path = tmp_path / "raw.json"
    arguments = ["--params", "tiny", "--rounds", "1", "--dtype", "bf16", "--shards", "fp32"]
    done = call_script(
        "loading.py", *arguments, "--files", "3", "--folder", str(tmp_path), "--json", str(path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [case] = json.loads(path.read_text())["cases"]
    assert case["nbytes"] == 2 * sum(case["contenders"]["floor"]["shards"]) // 4
    assert sum(case["contenders"]["ours"]["shards"]) == 2 * case["nbytes"]
    for found in case["contenders"].values():
        assert all(seconds > 0 for seconds in found["turns"][0]["seconds"])
    assert sum(case["contenders"]["ours"]["turns"][0]["read"]) >= case["nbytes"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw.json"], "it cleans up"


class _Silent:
    def show(self, console: Any) -> None:
        """Show nothing: a table needs all contenders."""


def _case(peak: int) -> dict[str, Any]:
    found = {
        name: {
            "turns": [{"seconds": [1.0, 2.0], "read": [80, 20], "pss": [peak, 10]}] * 2,
            "shards": [100 << 20, 50 << 20],
        }
        for name in ("ours", "full", "efficient", "floor")
    }
    about = {"params": "34m", "dtype": "bf16", "shards": "fp32", "files": 3, "nbytes": 100}
    return {**about, "ranks": 2, "contenders": found}


def test_a_peak_above_the_promise_is_too_high() -> None:
    from _loading_tables import loading_tables, too_high

    limit = int(1.1 * (100 << 20)) + (32 << 20)
    assert not too_high(_case(limit))
    assert too_high(_case(limit + 1))
    [table] = loading_tables({"cases": [_case(110 << 20)]})
    assert "bf16, shards in fp32, about 3 files" in table.title
    assert table.rows[0] == ["shardwise", "110", "1.10", "2.00", "1.00", "1.00"]
