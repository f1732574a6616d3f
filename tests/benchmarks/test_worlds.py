"""Worlds of processes: results come back in the order of ranks, failures by name and at once."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist


class Worker:
    """Does what a test asks a rank to do."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def summed(self, value: float) -> float:
        total = torch.tensor(value * (dist.get_rank() + 1) * self._factor)
        dist.all_reduce(total)
        return float(total)

    def where(self) -> tuple[int, int, str]:
        return dist.get_rank(), torch.get_num_threads(), os.environ["SHARDWISE_TRANSPORT"]

    def fail_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            raise ValueError("the worker's own words")
        dist.barrier()

    def die_on(self, rank: int) -> None:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def test_two_worlds_take_turns() -> None:
    from _worlds import World

    env = {"SHARDWISE_TRANSPORT": "collectives"}
    with World("a", 2, Worker, 1.0, env=env) as a, World("b", 2, Worker, 10.0, env=env) as b:
        assert a.call("summed", 1.0) == [3.0, 3.0]
        assert b.call("summed", 1.0) == [30.0, 30.0]
        before = b.cpu_seconds()
        assert a.call("summed", 2.0) == [6.0, 6.0]
        assert b.cpu_seconds() - before < 0.1, "a world that is not called sleeps"
        assert a.call("where") == [(0, 1, "collectives"), (1, 1, "collectives")]
        pids = a.pids + b.pids
    assert not [pid for pid in pids if _runs(pid)], "closed worlds leave no process"


@pytest.mark.parametrize(
    ("method", "complaint"),
    [("fail_on", "rank 1 failed in 'fail_on'"), ("die_on", "rank 1 died in 'die_on'")],
)
def test_rank_that_fails_ends_the_world(method: str, complaint: str) -> None:
    from _worlds import World, WorldError

    world = World("ours", 2, Worker, 1.0)
    pids = world.pids
    with pytest.raises(WorldError, match=f"ours: {complaint}") as caught:
        world.call(method, 1)
    if method == "fail_on":
        assert "the worker's own words" in str(caught.value)
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
