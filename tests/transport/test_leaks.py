"""The memory that the ranks of a host share does not grow, and is released."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.base import libc
from tests.harness import run_ranks
from tests.transport.conformance import Unread
from tests.transport.streams import CPU, over_shm, world_group

pytestmark = [
    pytest.mark.usefixtures("new_ranks"),
    pytest.mark.skipif(not libc.has_futex(), reason="needs Linux on x86-64"),
]


@dataclass(frozen=True)
class Held:
    """The resources of a process.

    Attributes:
        in_common: bytes that the shared file takes.
        descriptors: the number of open descriptors.
        windows: the number of mappings of the file.
        mappings: the number of all mappings.
    """

    in_common: int
    descriptors: int
    windows: int
    mappings: int

    @staticmethod
    def now(fd: int | None = None) -> Held:
        """Measure this process, and the file ``fd``."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return Held(
            512 * os.fstat(fd).st_blocks if fd is not None else 0,
            len(os.listdir("/proc/self/fd")),
            sum("memfd:shardwise" in line for line in maps),
            len(maps),
        )


def _repeat(rank: int, world_size: int, rounds: int, repeats: int) -> list[Held]:
    """Return the resources after each of several repeats of the same collectives."""
    stream = over_shm(world_group(), "leaks", Unread, largest=20_000)
    seen = []
    for _ in range(repeats):
        stream.rewind()
        for number in range(rounds):
            stream.start()
            if number % 4 == 3:  # in step, so that each takes the same memory every time
                stream.finish()
                dist.barrier()
        gc.collect()
        seen.append(Held.now(stream.transport._sync.connections.fd))
        dist.barrier()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_held_does_not_grow_with_the_number_of_collectives(world_size: int) -> None:
    for _, first, *later in run_ranks(_repeat, world_size, 60, 4):  # once to know what is needed
        for each in later:
            assert each.in_common == first.in_common
            assert each.descriptors == first.descriptors
            assert each.windows == first.windows
            # The allocator and the threads of gloo have mappings of their own.
            assert each.mappings <= first.mappings + 10


def _drop_unfreed(rank: int, world_size: int) -> list[int]:
    """Return the size of the file after each of several models that were dropped unsharded."""
    transport = over_shm(world_group(), "unfreed", Unread).transport
    numel, taken = 250_000, []
    for _ in range(5):
        buffers = transport.full_buffers([numel * world_size], [torch.float32], CPU)
        buffers.allocate()
        transport.all_gather([torch.full((numel,), rank + 1.0)], buffers.tensors).wait()
        view = buffers.tensors[0].view(world_size, numel)
        dist.barrier()
        del buffers
        dist.barrier()
        assert view.sum(1).tolist() == [numel * (each + 1.0) for each in range(world_size)]
        dist.barrier()
        del view
        dist.barrier()
        taken.append(Held.now(transport._sync.connections.fd).in_common)
        dist.barrier()
    return taken


def test_parameters_that_are_dropped_without_being_freed_are_given_back() -> None:
    for first, *later in run_ranks(_drop_unfreed, 2):
        assert first < 4 * 250_000, "their pages have gone back"
        assert max(later) <= first


def _drop_in_a_child(rank: int, world_size: int) -> float:
    """Drop a parameter in a child process, as a data loader's worker may."""
    transport = over_shm(world_group(), "child", Unread).transport
    buffers = transport.full_buffers([2000], [torch.float32], CPU)
    buffers.allocate()
    transport.all_gather([torch.ones(1000)], buffers.tensors).wait()
    full = buffers.tensors[0]
    child = os.fork()
    if child == 0:
        del buffers, full
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    return float(full.sum())


def test_what_a_child_process_drops_is_not_given_back() -> None:
    assert run_ranks(_drop_in_a_child, 2) == [2000.0, 2000.0]


def _drop_all(rank: int, world_size: int) -> tuple[Held, Held]:
    before = Held.now()
    stream = over_shm(world_group(), "dropped", Unread)
    for _ in range(30):
        stream.step()  # some of it is not waited for, some not freed
    dist.barrier()
    del stream
    dist.destroy_process_group()
    gc.collect()  # of the works under way, which hold the transport,
    gc.collect()  # and then of that
    return before, Held.now()


def test_nothing_stays_mapped_when_all_is_dropped() -> None:
    for before, after in run_ranks(_drop_all, 3):
        assert after.windows == 0
        assert after.descriptors <= before.descriptors
