"""Ranks that agree to stop over a backend for their device alone."""

from __future__ import annotations

import os
import signal

import torch.distributed as dist

from shardwise import GracefulStop
from shardwise.elastic.world import PARENT_PID
from tests.devices.device import NAME, register
from tests.devices.process_group import BACKEND, PretendGroup, register_backend
from tests.harness import run_ranks


def _steps(rank: int, world_size: int) -> tuple[int, list[str]]:
    register()
    register_backend()
    dist.init_process_group(f"{NAME}:{BACKEND}")
    with GracefulStop() as stop:
        for step in range(1, 100):
            if (rank, step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.requested():
                break
    group = dist.group.WORLD
    assert isinstance(group, PretendGroup)
    return step, group.calls


def test_all_ranks_stop_after_the_same_step() -> None:
    found = run_ranks(_steps, 2, backend=None, env={PARENT_PID: None})
    assert found == [(3, ["allreduce"] * 3)] * 2
