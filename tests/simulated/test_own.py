"""What a rank changes of what a process has one of: it keeps it, and no other rank sees it."""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.base import observe
from shardwise.timeline import record


def _draw_again() -> None:
    """Take the second of two numbers: no new one is drawn for it."""
    random.gauss(0.0, 1.0)


def _set_variable() -> None:
    os.environ["RANK_ONE"] = "1"


def _change_variable() -> None:
    os.environ["LOCAL_RANK"] = "7"


def _delete_variable() -> None:
    del os.environ["PATH"]


CASES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "draw of torch": (lambda: torch.rand(1), lambda: torch.get_rng_state().tolist()),
    "seed of torch": (lambda: torch.manual_seed(3), lambda: torch.get_rng_state().tolist()),
    "draw of Python": (random.random, random.getstate),
    "seed of Python": (lambda: random.seed(3), random.getstate),
    "half a draw of Python": (_draw_again, random.getstate),
    "draw of NumPy": (np.random.rand, lambda: str(np.random.get_state())),
    "seed of NumPy": (lambda: np.random.seed(3), lambda: str(np.random.get_state())),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "variable": (_set_variable, lambda: dict(os.environ)),
    "other variable": (_change_variable, lambda: dict(os.environ)),
    "deleted variable": (_delete_variable, lambda: dict(os.environ)),
    "folder": (lambda: os.chdir("/"), os.getcwd),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", [None, shardwise.schedules.Random(1)], ids=["order", "random"])
def test_a_change_of_one_rank_is_its_own(case: str, schedule: Any, tmp_path: Path) -> None:
    change, read = CASES[case]

    def each() -> list[Any]:
        random.seed(5)
        random.gauss(0.0, 1.0)
        seen = [read()]
        if dist.get_rank() == 1:
            change()
        for _ in range(3):
            seen.append(read())
            dist.barrier()
        return [*seen, read()]

    with contextlib.chdir(tmp_path):
        before = read()
        for rank, (first, *later) in enumerate(
            each.value for each in shardwise.simulate(each, 3, schedule=schedule)
        ):
            assert all(found == later[0] for found in later)
            assert (first == later[0]) == (rank != 1)
        assert read() == before


def test_a_rank_may_redirect_what_it_prints() -> None:
    def each() -> str:
        rank = dist.get_rank()
        if rank != 1:
            for _ in range(2):
                print(rank)
                dist.barrier()
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as own:
            print(rank)
            dist.barrier()
            print(rank)
        dist.barrier()
        return own.getvalue()

    shown = sys.stdout
    ranks = shardwise.simulate(each, 3)
    assert [rank.output for rank in ranks] == ["0\n0\n", "", "2\n2\n"]
    assert ranks[1].value == "1\n1\n"
    assert sys.stdout is shown


def test_a_rank_may_watch_itself() -> None:
    def each() -> list[str]:
        seen = [type(observe.watchers()[0]).__name__]
        own = record() if dist.get_rank() == 1 else contextlib.nullcontext()
        with own:
            for _ in range(2):
                observer = observe.watchers()[0]
                dist.barrier()
                seen.append(str(observe.watchers()[0] is observer))
        return seen

    assert [rank.value for rank in shardwise.simulate(each, 3)] == [
        ["Recorder", "True", "True"]
    ] * 3
    assert not observe.is_observed()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads choose no cores")
def test_threads_run_where_they_could_before() -> None:
    """A thread that waits is moved to the core of the one that wakes it, and no longer."""
    cores = os.sched_getaffinity(0)
    one = {max(cores)}

    def each() -> set[int]:
        if dist.get_rank() == 1:
            os.sched_setaffinity(0, one)
        for _ in range(50):
            dist.barrier()
        if dist.get_rank() == 2:
            with pytest.raises(shardwise.PeerLostError):
                dist.barrier()
        return os.sched_getaffinity(0)

    assert [rank.value for rank in shardwise.simulate(each, 3)] == [cores, one, cores]
    assert os.sched_getaffinity(0) == cores


def test_memory_that_another_rank_frees_is_that_of_its_own_rank() -> None:
    def each() -> None:
        if dist.get_rank() == 0:
            held.append(torch.ones(25))
            observe.memory_of(observe.Memory.OTHER, "mine", held[0])
        dist.barrier()
        if dist.get_rank() == 1:
            held.clear()
        dist.barrier()

    held: list[torch.Tensor] = []
    ranks = shardwise.simulate(each, 2).timeline().ranks
    assert [[change.nbytes for change in rank.changes] for rank in ranks] == [[100, -100], []]
