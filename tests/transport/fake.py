"""Ranks as threads: a whole world in one process, for tests that need no real messages.

    def each_rank(transport):
        shards, fulls = [torch.ones(2)], [torch.empty(4)]
        transport.all_gather(shards, fulls).wait()
        return fulls[0]

    results = FakeWorld(2).run(each_rank)

Stricter than a real transport: what a call will write holds no sensible value until the wait, and
what it reads may not change before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardwise.errors import PeerLostError
from shardwise.transport.base import Reduce
from shardwise.transport.memory import OwnMemory

T = TypeVar("T")
Copies = list[torch.Tensor]


class FakeWorld:
    """``world_size`` ranks that meet in memory.

    Args:
        world_size: number of ranks.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, world_size: int, timeout: float = 10) -> None:
        self.timeout = timeout
        self.changed = threading.Condition()
        self.calls: dict[int, dict[int, tuple[str, Copies]]] = {}
        self.transports = [FakeTransport(self, rank, world_size) for rank in range(world_size)]

    def run(self, function: Callable[[FakeTransport], T]) -> list[T]:
        """Call ``function`` with every rank's transport, each in a thread of its own."""
        with ThreadPoolExecutor(len(self.transports)) as threads:
            futures = [threads.submit(function, transport) for transport in self.transports]
            failures = [error for future in futures if (error := future.exception()) is not None]
            # A rank that gives up waiting echoes another's error: show the other's.
            for error in sorted(failures, key=lambda e: isinstance(e, PeerLostError)):
                raise error
            return [future.result() for future in futures]


class FakeTransport(OwnMemory):
    """One rank of a :class:`FakeWorld`."""

    name = "fake"

    def __init__(self, world: FakeWorld, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.log: list[str] = []  # the collectives of this rank, in order
        self._world = world

    def all_gather(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> FakeWork:
        def finish(ranks: list[Copies]) -> None:
            for i, full in enumerate(fulls):
                for chunk, shards in zip(full.chunk(self.world_size), ranks, strict=False):
                    chunk[: shards[i].numel()].copy_(shards[i])

        return FakeWork(self, "all_gather", shards, fulls, finish)

    def reduce_scatter(
        self, fulls: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], op: Reduce
    ) -> FakeWork:
        def finish(ranks: list[Copies]) -> None:
            for i, shard in enumerate(shards):
                start = self.rank * shard.numel()
                parts = [fulls[i][start : start + shard.numel()] for fulls in ranks]
                shard[: parts[0].numel()].copy_(_reduce(parts, shard.dtype, op))

        return FakeWork(self, f"reduce_scatter {op.name}", fulls, shards, finish)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Reduce) -> FakeWork:
        def finish(ranks: list[Copies]) -> None:
            for i, tensor in enumerate(tensors):
                tensor.copy_(_reduce([each[i] for each in ranks], tensor.dtype, op))

        return FakeWork(self, f"all_reduce {op.name}", tensors, (), finish)

    def post(self, what: str, reads: Copies) -> int:
        world, number = self._world, len(self.log)
        with world.changed:
            self.log.append(what)
            world.calls.setdefault(number, {})[self.rank] = (what, reads)
            world.changed.notify_all()
        return number

    def collect(self, number: int) -> list[Copies]:
        world, what = self._world, self.log[number]
        with world.changed:
            posted = world.calls[number]
            if not world.changed.wait_for(lambda: len(posted) == self.world_size, world.timeout):
                missing = sorted(set(range(self.world_size)) - set(posted))
                raise PeerLostError(f"rank {self.rank}: ranks {missing} never came to {what}")
        names = {rank: posted[rank][0] for rank in sorted(posted)}
        assert set(names.values()) == {what}, f"ranks diverged at call {number}: {names}"
        return [posted[rank][1] for rank in sorted(posted)]


class FakeWork:
    """What a real transport would do in the background happens in :meth:`wait`."""

    def __init__(
        self,
        transport: FakeTransport,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        finish: Callable[[list[Copies]], Any],
    ) -> None:
        self._reads = reads
        self._copies = [tensor.detach().clone() for tensor in reads]
        for tensor in writes:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        self._number = transport.post(f"{what} of {len(reads)}", self._copies)
        self._transport = transport
        self._finish: Callable[[list[Copies]], Any] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            for tensor, copy in zip(self._reads, self._copies, strict=True):
                same = torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
                assert same, "a tensor of a collective changed before the wait"
            finish(self._transport.collect(self._number))


def _reduce(parts: Copies, dtype: torch.dtype, op: Reduce) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total / len(parts) if op is Reduce.AVG else total
