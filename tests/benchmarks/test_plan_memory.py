"""``benchmarks/plan_memory.py`` compares plans with the memory of real ranks."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="PSS comes from Linux's /proc"
)


def case(base: int, *peaks: list[int], unmapped: int = 0, **predicted: int) -> dict[str, Any]:
    """Return a case whose figures are in MiB: for each run, the peaks of its ranks."""
    return {
        "case": {"model": "34m", "size": 256, "mesh": "dp=2", "dtype": "fp32"},
        "predicted": {kind: nbytes * MIB for kind, nbytes in predicted.items()},
        "runs": [
            [{"base": base * MIB, "peak": p * MIB, "unmapped": unmapped * MIB} for p in ranks]
            for ranks in peaks
        ],
    }


def test_the_factor_is_the_median_over_ranks_and_predicts_them() -> None:
    from plan_memory import tables

    usual = [case(100, [250, 250], peak=100)] * 3
    peaks = [900, 280], [235, 280], [240, 100]
    shared = case(100, *peaks, unmapped=10, peak=120)
    [table] = tables([*usual, shared])
    assert [row[2:] for row in table.rows[:3]] == [["100", "100", "250", "250", "1.000"]] * 3
    # The medians of its ranks are 250 and 290 MiB; the rank that is further off.
    assert table.rows[3][2:] == ["100", "120", "280", "250", "1.120"]
    assert "1.50 x its tensors" in table.notes[0]
    assert "3 of 4 are within 5 %, 0.0 % off in the median, 12.0 % at most" in table.notes[1]


def test_shared_memory_that_no_rank_maps_is_found() -> None:
    from plan_memory import unmapped

    fd = os.memfd_create("shardwise")
    os.ftruncate(fd, 8 * MIB)
    before = unmapped([os.getpid()])
    os.pwrite(fd, b"\1" * (8 * MIB), 0)
    nobody_maps = unmapped([os.getpid()])
    assert 7 * MIB < nobody_maps - before <= 8 * MIB  # this process may map some from other tests
    with mmap.mmap(fd, 4 * MIB) as window:
        assert sum(window[:: mmap.PAGESIZE]) == 4 * MIB // mmap.PAGESIZE
        assert nobody_maps - unmapped([os.getpid()]) == 4 * MIB
    os.close(fd)
