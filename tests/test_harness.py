"""The harness itself: results, failures, deaths and hangs of ranks are told truthfully."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks._devices import take_gpu
from shardwise.sharding import state
from shardwise.sharding.group import ParamGroup
from shardwise.transport import buckets
from tests.harness import Processes, RanksFailedError, run_ranks

Ranks = Callable[..., list[Any]]


def _sum_over_ranks(rank: int, world_size: int, scale: float, *, offset: float = 0.0) -> object:
    value = torch.tensor(scale * rank + offset)
    dist.all_reduce(value)
    return value, world_size, os.environ["RANK"]


def test_every_rank_returns_its_own_result(ranks: Ranks) -> None:
    results = ranks(_sum_over_ranks, 3, 10.0, offset=1.0)

    assert results == [(torch.tensor(33.0), 3, str(rank)) for rank in range(3)]


def _raise_on_rank_one(rank: int, world_size: int) -> None:
    print(f"rank {rank} says hello")
    if rank == 1:
        raise KeyError("layers.3.weight")
    dist.barrier()


def test_a_raising_rank_ends_the_run_at_once_and_shows_its_traceback_and_output() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_raise_on_rank_one, 2, pg_timeout=600)

    message = str(failure.value)
    assert "rank 1 of 2 raised" in message
    assert 'KeyError("layers.3.weight")' in message
    assert "in _raise_on_rank_one" in message
    assert "rank 1 says hello" in message


def _hang_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_a_hanging_rank_ends_the_run_with_its_stack() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_hang_on_rank_one, 2, timeout=3)

    message = str(failure.value)
    assert "ranks [1] did not return within 3 s" in message
    assert "in _hang_on_rank_one" in message


def _end_differently(rank: int, world_size: int) -> str:
    if rank == 1:
        raise ValueError("no such option")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        os._exit(7)
    return "well"


def test_expected_failures_are_told_apart(ranks: Ranks) -> None:
    # Without a process group, which a rank that ends early would break while others make it.
    ends = ranks(_end_differently, 4, backend=None, expect_failures=True)
    well, raised, killed, left = ends

    assert (well.ok, well.result, well.exitcode) == (True, "well", 0)
    assert not raised.ok
    assert "ValueError: no such option" in raised.error
    assert not killed.ok
    assert killed.exitcode == -signal.SIGKILL
    assert not left.ok
    assert left.exitcode == 7


def _process(rank: int, world_size: int) -> int:
    return os.getpid()


def _leave_things_behind(rank: int, world_size: int, folder: str) -> None:
    os.environ["COLOR"] = "red"
    os.chdir(folder)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state.state_of = lambda module: None
    ParamGroup.unshard = lambda self: None  # type: ignore[method-assign, assignment]
    buckets.BLOCK_BYTES = 1


def _find_them(rank: int, world_size: int, folder: str) -> list[str]:
    found = {
        "variable": "COLOR" in os.environ,
        "folder": os.getcwd() == os.path.realpath(folder),
        "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        "function": state.state_of.__module__ != state.__name__,
        "method": ParamGroup.unshard.__module__ != ParamGroup.__module__,
        "constant": buckets.BLOCK_BYTES == 1,
    }
    return [name for name, is_there in found.items() if is_there]


def test_ranks_live_on_and_put_back_what_a_function_has_changed(
    ranks: Ranks, tmp_path: Path
) -> None:
    processes = ranks(_process, 2)
    assert _find_in(ranks, str(tmp_path)) == []
    ranks(_leave_things_behind, 2, str(tmp_path))
    assert ranks(_process, 2) == processes
    assert _find_in(ranks, str(tmp_path)) == []
    assert ranks(_process, 2, processes=Processes.NEW) != processes
    with pytest.raises(RanksFailedError):
        ranks(_raise_on_rank_one, 2)
    assert ranks(_process, 2) != processes, "ranks that fail are not used again"


def _find_in(ranks: Ranks, folder: str) -> list[str]:
    first, second = ranks(_find_them, 2, folder)
    return first + second


def _exit_early(rank: int, world_size: int, code: int) -> None:
    if rank == 0:
        sys.exit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_returning_is_a_failure(code: int) -> None:
    with pytest.raises(RanksFailedError, match=f"rank 0 of 2 left with exit code {code}"):
        run_ranks(_exit_early, 2, code)


def _warn(rank: int, world_size: int) -> None:
    warnings.warn("old habit", DeprecationWarning, stacklevel=1)


def test_warnings_are_errors_on_ranks_too() -> None:
    with pytest.raises(RanksFailedError, match="DeprecationWarning: old habit"):
        run_ranks(_warn, 1)


def _environment(rank: int, world_size: int) -> tuple[str | None, str | None, bool]:
    return os.environ.get("COLOR"), os.environ.get("HOME"), dist.is_initialized()


def test_environment_and_backend_are_the_callers(ranks: Ranks) -> None:
    assert ranks(_environment, 1, backend=None, env={"COLOR": "green", "HOME": None}) == [
        ("green", None, False)
    ]


@pytest.mark.parametrize(("gpus", "taken"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (4, [0, 1, 2])])
@pytest.mark.parametrize("nccl", [(), (2, 29, 7), (2, 30), (2, 32, 3)])
def test_ranks_share_a_gpu_as_their_nccl_can(
    monkeypatch: pytest.MonkeyPatch, nccl: tuple[int, ...], gpus: int, taken: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: bool(nccl))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    found, current, ways = [], [], []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for rank in range(3):
        monkeypatch.setattr(os, "environ", {})  # of its process
        found.append(take_gpu(rank, 3))
        ways.append(dict(os.environ))
    assert [device.index for device in found] == taken
    assert current == found
    if gpus >= 3:
        assert ways == [{}] * 3, "none shares"
    elif nccl >= (2, 30):
        assert ways == [{"NCCL_MULTI_RANK_GPU_ENABLE": "1"}] * 3
    else:
        sockets = {"NCCL_SOCKET_IFNAME": "lo"}
        assert ways == [{"NCCL_HOSTID": f"rank {rank}", **sockets} for rank in range(3)]
