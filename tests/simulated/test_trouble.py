"""What simulated ranks do that nobody would plan, and what comes of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise


def _build() -> nn.Module:
    return shardwise.fully_shard(nn.Linear(4, 4))


def _fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("layers.3.weight")
    dist.barrier()


def test_a_rank_may_poll_for_what_the_others_bring() -> None:
    def each() -> bool:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        return any(work.is_completed() for _ in range(3))

    assert [rank.value for rank in shardwise.simulate(each, 2)] == [True, True]


def test_a_rank_may_remove_its_current_folder(tmp_path: Path) -> None:
    def each() -> int:
        folder = tmp_path / str(dist.get_rank())
        folder.mkdir()
        os.chdir(folder)
        dist.barrier()
        folder.rmdir()
        dist.barrier()
        return dist.get_rank()

    assert [rank.value for rank in shardwise.simulate(each, 2)] == [0, 1]


def test_a_rank_may_make_its_process_group_again() -> None:
    def each() -> float:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    assert [rank.value for rank in shardwise.simulate(each, 2)] == [2.0, 2.0]


def test_a_simulation_in_another_thread_of_a_rank_is_told() -> None:
    def simulate(told: list[str]) -> None:
        with pytest.raises(RuntimeError) as error:
            shardwise.simulate(dist.get_rank, 2)
        told.append(str(error.value))

    def each() -> list[str]:
        told: list[str] = []
        thread = threading.Thread(target=simulate, args=(told,))
        thread.start()
        thread.join()
        dist.barrier()
        return told

    for rank in shardwise.simulate(each, 2):
        assert "while this process runs others" in rank.value[0]


def test_ranks_that_have_ended_say_so() -> None:
    with shardwise.simulation(2) as world:
        with pytest.raises(KeyError):
            world.run(_fails_on_one)
        with pytest.raises(RuntimeError, match="these 2 simulated ranks have ended"):
            world.run(_build)
    with shardwise.simulation(2) as world:
        ranks = world.run(_build)
    for use in (lambda: world.run(_build), lambda: shardwise.inspect(ranks)):
        with pytest.raises(RuntimeError, match="these 2 simulated ranks have ended"):
            use()


@pytest.mark.parametrize("waits", [True, False])
def test_an_interrupt_ends_all_ranks(waits: bool) -> None:
    """Whether they run, wait, or have not begun."""
    begun: list[int] = []

    def each() -> None:
        begun.append(dist.get_rank())
        if waits and dist.get_rank() == 0:
            dist.barrier()
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass

    began_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        shardwise.simulate(each, 3)
    assert time.monotonic() - began_at < 15
    assert begun == [0, 1][: 1 + waits]
    assert not any(thread.name.startswith("rank-") for thread in threading.enumerate())
    assert [rank.value for rank in shardwise.simulate(dist.get_rank, 3)] == [0, 1, 2]
