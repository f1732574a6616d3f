"""``benchmarks/plan_memory.py`` compares plans with the memory of real ranks."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import call_script

MIB = 2**20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="PSS comes from Linux's /proc"
)


def case(wire: str, base: int, peaks: list[int], **predicted: int) -> dict[str, Any]:
    """Return a case whose figures are in MiB."""
    kinds = dict.fromkeys(("parameters", "optimizer", "full_parameters", "transport"), 0)
    kinds |= predicted
    return {
        "case": {"model": "34m", "size": 256, "mesh": "dp=2", "transport": wire},
        "predicted": {kind: nbytes * MIB for kind, nbytes in kinds.items()},
        "ranks": [{"base": base * MIB, "peak": peak * MIB} for peak in peaks],
    }


def test_slack_is_fitted_on_the_first_rows_and_predicts_the_others() -> None:
    from _plan_memory_tables import plan_memory_tables

    fitted = [case("c10d", 100, [260, 260], peak=140, optimizer=40, full_parameters=50)] * 3
    shared = case("shm", 100, [250, 280], peak=150, full_parameters=40, transport=10)
    [table] = plan_memory_tables({"cases": [*fitted, shared]})
    assert [row[2:] for row in table.rows[:3]] == [["100", "140", "20", "260", "260", "1.000"]] * 3
    # 20 % of 100 MiB that are neither states nor shared; the rank that is further off.
    assert table.rows[3][2:] == ["100", "150", "20", "270", "250", "1.080"]
    assert "slack: 20.0 %" in table.notes[0]
    assert "The other 1: 0 within 5 %" in table.notes[1]


def test_runs_are_the_pages_that_are_present() -> None:
    from plan_memory import _runs

    present = [False, True, True, False, True]
    entries = b"".join((each << 63 | 7).to_bytes(8, "little") for each in present)
    assert list(_runs(entries)) == [range(1, 3), range(4, 5)]


def test_shared_pages_become_this_process_s_own() -> None:
    from _memory import pss
    from plan_memory import unshare

    memory = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"\1" * len(memory))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before = pss()
        unshare()
        os.write(write, b"%d" % (pss() - before))
        os._exit(0)
    grown = int(os.read(read, 64))
    assert os.waitpid(child, 0)[1] == 0
    assert grown > 30 * MIB, "half of each page was another process's"


def test_peaks_and_plans_of_real_ranks(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    arguments = ["--model", "tiny", "--size", "512", "--mesh", "dp=2", "--transport", "c10d"]
    done = call_script("plan_memory.py", *arguments, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads(path.read_text())["cases"]
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        grown = rank["peak"] - rank["base"]
        assert 0.5 * found["predicted"]["peak"] < grown < 3 * found["predicted"]["peak"]
    assert "tiny, 512 tokens, fp32, full, c10d (fitted)" in done.stdout
