"""Rows from every rank to every rank, over gloo's messages and over torch's collective."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from shardwise.base import observe
from shardwise.transport.all_to_all import AllToAll
from shardwise.transport.base import Label
from shardwise.transport.runner import Exchange
from tests.test_observe import Notes
from tests.worlds import on_processes

pytestmark = pytest.mark.usefixtures("new_ranks")

CPU = torch.device("cpu")


def _rows(rank: int, world_size: int, step: int, width: int) -> torch.Tensor:
    """Rows whose bytes say who sends them to whom, and when."""
    values = [[rank * 16 + to + step * 3] * width for to in range(world_size)]
    return torch.tensor(values, dtype=torch.uint8)


def _expected(rank: int, world_size: int, step: int, width: int) -> torch.Tensor:
    return torch.stack([_rows(each, world_size, step, width)[rank] for each in range(world_size)])


def _swap(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    by_messages, by_collective = (AllToAll(dist.group.WORLD, CPU) for _ in range(2))
    by_collective._waiter = None  # as on other backends
    for swap in (by_messages, by_collective):
        for step, width in enumerate([1, 1000, 300_000]):
            received = torch.empty(world_size, width, dtype=torch.uint8)
            work = swap.start(_rows(rank, world_size, step, width), received, Label(str(step)))
            work.wait()
            assert torch.equal(received, _expected(rank, world_size, step, width))
        assert swap.bytes_sent == (world_size - 1) * (1 + 1000 + 300_000)


def _any_order(rank: int, world_size: int) -> None:
    """Ranks start two swaps in different orders, and wait for them in others."""
    assert dist.group.WORLD is not None
    swap = AllToAll(dist.group.WORLD, CPU)
    order = [0, 1] if rank else [1, 0]
    received = torch.empty(2, world_size, 100_000, dtype=torch.uint8)
    works = {
        step: swap.start(
            _rows(rank, world_size, step, 100_000), received[step], Label(f"fragment {step}")
        )
        for step in order
    }
    for step in (0, 1):
        works[step].wait()
        assert torch.equal(received[step], _expected(rank, world_size, step, 100_000))


def _nobody_waits(rank: int, world_size: int) -> None:
    """A swap that is dropped harms none that follows."""
    assert dist.group.WORLD is not None
    swap = AllToAll(dist.group.WORLD, CPU)
    for step in range(3):
        received = torch.empty(world_size, 200_000, dtype=torch.uint8)
        work = swap.start(_rows(rank, world_size, step, 200_000), received, Label(str(step)))
        if step < 2:
            del work, received
            gc.collect()
    work.wait()
    assert torch.equal(received, _expected(rank, world_size, 2, 200_000))


@on_processes(2)
def test_a_swap_is_reported_until_it_has_arrived(rank: int, world_size: int) -> None:
    assert dist.group.WORLD is not None
    swap = AllToAll(dist.group.WORLD, CPU)
    for wait in (Exchange.wait, Exchange.land):
        notes, received = Notes(), torch.empty(world_size, 10, dtype=torch.uint8)
        with observe.observing(notes):
            wait(swap.start(_rows(rank, world_size, 0, 10), received, Label("rows")))
        assert notes.lines[-1] == "end of all-to-all of rows"


@on_processes(3)
def test_rows_arrive_in_any_order_of_calls_and_waits(rank: int, world_size: int) -> None:
    for check in (_swap, _any_order, _nobody_waits):
        check(rank, world_size)
        dist.barrier()
