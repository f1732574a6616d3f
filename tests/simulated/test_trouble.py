"""What simulated ranks do that nobody would plan, and what comes of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import shardwise


def _build() -> nn.Module:
    return shardwise.fully_shard(nn.Linear(4, 4))


def _trained() -> None:
    model = _build()
    model(torch.ones(1, 4)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    norm.full_tensor()


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
    """The ranks of the one that runs go on."""

    def tried(run: Callable[..., object]) -> str:
        with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError) as error:
            pool.submit(run, dist.get_rank).result()
        dist.barrier()
        return str(error.value)

    with shardwise.simulation(2) as world:
        for run in (lambda function: shardwise.simulate(function, 2), world.run):
            for rank in world.run(tried, run):
                assert "cannot run simulated ranks while this process runs others" in rank.value


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
    threads = set(threading.enumerate())

    def each() -> None:
        begun.append(dist.get_rank())
        if waits and dist.get_rank() == 0:
            dist.barrier()
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    began_at = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            shardwise.simulate(each, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began_at < 15
    assert begun == [0, 1][: 1 + waits]
    assert set(threading.enumerate()) <= threads
    assert [rank.value for rank in shardwise.simulate(dist.get_rank, 3)] == [0, 1, 2]


def test_meshes_of_ranks_that_have_ended_are_let_go() -> None:
    def count() -> int:
        gc.collect()
        return sum(isinstance(each, DeviceMesh) for each in gc.get_objects())

    before = count()
    for _ in range(3):
        shardwise.simulate(_trained, 2)
    assert count() <= before


def test_a_rank_may_leave_loss_parallel_before_the_others() -> None:
    def each() -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        logits = distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)])
        losses = []
        with loss_parallel():
            for _ in range(2):
                loss = nn.functional.cross_entropy(logits, torch.tensor([0, 3]))
                losses.append(loss.full_tensor().item())
        return losses

    expected = nn.functional.cross_entropy(torch.arange(8.0).view(2, 4), torch.tensor([0, 3]))
    for rank in shardwise.simulate(each, 2):
        assert rank.value == pytest.approx([expected.item()] * 2)


def test_a_rank_saves_in_no_other_thread(tmp_path: Path) -> None:
    def each() -> None:
        shardwise.checkpoint.save(tmp_path / "one", _build())
        shardwise.checkpoint.async_save(tmp_path / "two", _build())

    with pytest.raises(RuntimeError, match=r"rank 0 of 2 is simulated.*call checkpoint\.save"):
        shardwise.simulate(each, 2)
    assert (tmp_path / "one").exists()
