"""What ``benchmarks/plan_memory.py`` counts of the memory of real ranks."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

MIB = 2**20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="PSS comes from Linux's /proc"
)


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
