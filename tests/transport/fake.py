"""A fake transport, and a world of ranks that are threads of one process.

    def each_rank(transport):
        shards, fulls = [torch.ones(2)], [torch.empty(4)]
        transport.all_gather(shards, fulls).wait()
        return fulls[0]

    results = FakeWorld(2).run(each_rank)

Ranks take turns: one runs until it has to wait for another. So nothing depends on timing, and where
every rank waits, all of them fail at once instead of after a timeout. Each rank has a random number
generator of its own, as a process has.

The fake is stricter than a real transport. What a call will write holds no sensible value until the
wait, and what a reduction reads must not change before the wait. Ranks that call different
collectives, or allocate and free in different orders, fail as soon as they differ.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.transport.base import Call, Label, Reduce, Transport
from shardwise.transport.memory import HeapBuffers

T = TypeVar("T")
Copies = list[torch.Tensor]


class Turns:
    """Threads that take turns: one runs until it has to wait for another.

    The turn is passed in the order of ranks, and to one thread: others sleep on.

    Args:
        world_size: number of ranks, each of which is a thread.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._gates = [threading.Semaphore(0) for _ in range(world_size)]
        self._ready = set(range(world_size))
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._stuck: dict[int, str] = {}
        self._rank = threading.local()

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call ``function(rank)`` for every rank.

        Raises:
            Exception: what a rank raised. If several did, one that did not just miss another rank.
        """
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def be(rank: int) -> None:
            self._gates[rank].acquire()
            self._ready.discard(rank)
            self._rank.number = rank
            torch.set_num_threads(1)  # a setting of each thread
            torch.manual_seed(0)
            try:
                results[rank] = function(rank)
            except BaseException as error:
                error.add_note(f"(on rank {rank} of {self.world_size})")
                failures.append(error)
            finally:
                self._pass_on(rank)

        state = torch.get_rng_state()
        self._ready.update(range(self.world_size))
        threads = [
            threading.Thread(target=be, args=(rank,), daemon=True, name=f"rank-{rank}")
            for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        for thread in threads:
            thread.join()
        torch.set_rng_state(state)
        # A rank that misses another one only echoes the other's error: show the other's.
        for error in sorted(failures, key=lambda each: isinstance(each, PeerLostError)):
            raise error
        return [results[rank] for rank in range(self.world_size)]

    @property
    def rank(self) -> int:
        """The rank of the calling thread."""
        number: int = self._rank.number
        return number

    def wait_for(self, is_over: Callable[[], bool], doing: str) -> None:
        """Let other ranks run until ``is_over()``.

        Args:
            is_over: called whenever another rank waits or ends.
            doing: what the rank waits in, for messages.

        Raises:
            PeerLostError: no rank is left that could make it true.
        """
        if is_over():
            return
        rank, state = self.rank, torch.get_rng_state()
        self._waiting[rank] = (is_over, doing)
        self._pass_on(rank)
        self._gates[rank].acquire()
        del self._waiting[rank]
        torch.set_rng_state(state)
        stuck = self._stuck.pop(rank, None)
        if stuck is not None:
            raise PeerLostError(f"rank {rank} waits forever in {doing}: {stuck}")

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank behind ``rank`` that can go on."""
        behind = [(rank + step) % self.world_size for step in range(1, self.world_size + 1)]
        for each in behind:
            if each in self._ready or each in self._stuck or self._is_over(each):
                self._gates[each].release()
                return
        if self._waiting:
            self._note_stuck()
            self._pass_on(rank)

    def _is_over(self, rank: int) -> bool:
        return rank in self._waiting and self._waiting[rank][0]()

    def _note_stuck(self) -> None:
        each = [f"rank {rank} waits in {self._waiting[rank][1]}" for rank in sorted(self._waiting)]
        ended = sorted(set(range(self.world_size)) - set(self._waiting))
        each += [f"rank {rank} has ended" for rank in ended]
        self._stuck.update(dict.fromkeys(self._waiting, ", ".join(each)))


@dataclass(frozen=True)
class Made:
    """A collective call. It is equal on all ranks unless they have diverged."""

    kind: str
    label: Label
    tensors: tuple[tuple[int, torch.dtype], ...]

    @classmethod
    def of(cls, kind: str, tensors: Sequence[torch.Tensor], label: Label) -> Made:
        """Describe a call by the tensors whose sizes all ranks have in common."""
        return cls(kind, label, tuple((each.numel(), each.dtype) for each in tensors))

    def __str__(self) -> str:
        return f"{self.kind} {self.label.name}".rstrip()


@dataclass
class Channel:
    """The state that the ranks of one group share.

    Attributes:
        members: the ranks of the group.
        posted: by number of the call and rank, what was called, with copies of what it reads.
        memory: by rank, what it did to full buffers, in order.
        counts: by rank, the number of its last call.
    """

    members: tuple[int, ...]
    posted: dict[int, dict[int, tuple[Made, Copies]]] = field(default_factory=dict)
    memory: dict[int, list[str]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


@dataclass
class Box:
    """Messages from one rank to another, in the order of sending.

    Attributes:
        sent: the messages.
        asked_for: how many the receiver has asked for, which may be more than were sent.
    """

    sent: list[Copies] = field(default_factory=list)
    asked_for: int = 0


class FakeWorld:
    """A world of ranks in one process.

    Args:
        world_size: number of ranks.

    Attributes:
        number: tells this world from all others.
        turns: lets one rank run at a time.
    """

    _numbers = itertools.count()

    def __init__(self, world_size: int) -> None:
        self.number = next(self._numbers)
        self.turns = Turns(world_size)
        self._boxes: dict[Hashable, Box] = {}
        self._channels: dict[Hashable, Channel] = {}

    def run(self, function: Callable[[FakeTransport], T]) -> list[T]:
        """Call ``function`` with every rank's transport, each in a thread of its own."""
        everybody = range(self.turns.world_size)
        return self.turns.run(lambda rank: function(self.transport(everybody)))

    def box(self, address: Hashable) -> Box:
        """Return the messages sent to an address."""
        return self._boxes.setdefault(address, Box())

    def transport(
        self, members: Sequence[int], key: Hashable = None, *, overlaps: bool = False
    ) -> FakeTransport:
        """Make the calling rank's transport over ``members``.

        Args:
            members: the ranks of the group, in order.
            key: distinguishes this group from others of the same ranks.
            overlaps: what the transport decides in ``overlaps_compute``.
        """
        key = (tuple(members), key)
        channel = self._channels.setdefault(key, Channel(tuple(members)))
        return FakeTransport(self.turns, channel, overlaps=overlaps)


class FakeTransport(Transport):
    """One rank of a :class:`FakeWorld`.

    Attributes:
        log: the collectives of this rank, in order.
    """

    name = "fake"

    def __init__(self, turns: Turns, channel: Channel, *, overlaps: bool) -> None:
        self.rank = channel.members.index(turns.rank)
        self.world_size = len(channel.members)
        self.overlaps_compute = overlaps
        self.log: list[Made] = []
        self._turns = turns
        self._channel = channel

    def full_buffers(
        self, numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
    ) -> FakeBuffers:
        """Make (not yet allocated) memory to gather into."""
        return FakeBuffers(self, numels, dtypes, device)

    def _all_gather(self, call: Call) -> FakeWork:
        """Copy the shards now, and gather them at the wait."""
        shards, fulls = call.inputs, call.outputs

        def finish(ranks: list[Copies]) -> None:
            for i, full in enumerate(fulls):
                for chunk, shards in zip(full.chunk(self.world_size), ranks, strict=False):
                    chunk[: shards[i].numel()].copy_(shards[i])

        made = Made.of("all_gather", fulls, call.label)
        return FakeWork(self, made, shards, fulls, finish, reads_are_free=True)

    def _reduce_scatter(self, call: Call) -> FakeWork:
        """Reduce at the wait, in the order of ranks."""
        fulls, shards, op = call.inputs, call.outputs, call.op

        def finish(ranks: list[Copies]) -> None:
            for i, shard in enumerate(shards):
                start = self.rank * shard.numel()
                parts = [fulls[i][start : start + shard.numel()] for fulls in ranks]
                shard[: parts[0].numel()].copy_(_reduce(parts, shard.dtype, op))

        made = Made.of(f"reduce_scatter {op.name}", shards, call.label)
        return FakeWork(self, made, fulls, shards, finish)

    def _all_reduce(self, call: Call) -> FakeWork:
        """Reduce in place at the wait, in the order of ranks."""
        tensors, op = call.outputs, call.op

        def finish(ranks: list[Copies]) -> None:
            for i, tensor in enumerate(tensors):
                tensor.copy_(_reduce([each[i] for each in ranks], tensor.dtype, op))

        made = Made.of(f"all_reduce {op.name}", tensors, call.label)
        return FakeWork(self, made, tensors, (), finish)

    def post(self, call: Made, reads: Copies) -> int:
        """Record a call of this rank, and return its number."""
        channel = self._channel
        number = channel.counts[self.rank] = channel.counts.get(self.rank, -1) + 1
        channel.posted.setdefault(number, {})[self.rank] = (call, reads)
        self.log.append(call)
        return number

    def collect(self, number: int) -> list[Copies]:
        """Wait until all ranks have made call ``number``, and return what each of them reads.

        Raises:
            RanksDivergedError: another rank calls something else.
            PeerLostError: another rank never calls.
        """
        posted = self._channel.posted[number]
        call, _ = posted[self.rank]

        def differs() -> bool:
            return any(theirs != call for theirs, _ in posted.values())

        self._turns.wait_for(lambda: differs() or len(posted) == self.world_size, f"{call}")
        if differs():
            names = {self._channel.members[each]: str(posted[each][0]) for each in sorted(posted)}
            raise RanksDivergedError(f"ranks have diverged at collective number {number}: {names}")
        return [posted[rank][1] for rank in sorted(posted)]

    def note_memory(self, what: str) -> None:
        """Record what is done to full buffers, and compare it with the other ranks.

        Raises:
            RanksDivergedError: another rank did something else.
        """
        memory = self._channel.memory
        mine = memory.setdefault(self.rank, [])
        mine.append(what)
        for rank, theirs in memory.items():
            if len(theirs) >= len(mine) and theirs[len(mine) - 1] != what:
                raise RanksDivergedError(
                    f"rank {self.rank} had memory for {mine} and rank {rank} for {theirs}"
                )


class FakeBuffers(HeapBuffers):
    """Full tensors in private memory, filled with NaN at every allocation."""

    def __init__(
        self,
        transport: FakeTransport,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        super().__init__(numels, dtypes, device)
        self._transport = transport
        self._is_allocated = False

    def allocate(self) -> None:
        """Give every tensor its memory, with undefined contents; keep what is there already."""
        if not self._is_allocated:
            self._is_allocated = True
            self._transport.note_memory("allocate")
            super().allocate()
            for tensor in self.tensors:
                tensor.data.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype

    def free(self) -> None:
        """Give the memory of every tensor back."""
        if self._is_allocated:
            self._is_allocated = False
            self._transport.note_memory("free")
            super().free()


class FakeWork:
    """A collective that happens entirely in :meth:`wait`."""

    def __init__(
        self,
        transport: FakeTransport,
        call: Made,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        finish: Callable[[list[Copies]], None],
        *,
        reads_are_free: bool = False,
    ) -> None:
        self._reads = () if reads_are_free else reads
        self._copies = [tensor.detach().clone() for tensor in reads]
        for tensor in writes:
            tensor.view(torch.uint8).fill_(0xFF)
        self._number = transport.post(call, self._copies)
        self._transport = transport
        self._finish: Callable[[list[Copies]], None] | None = finish
        self._failure: BaseException | None = None

    def wait(self) -> None:
        """Complete the collective, the first time.

        Raises:
            RanksDivergedError: another rank calls something else.
            PeerLostError: another rank never calls.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is None:
            return
        try:
            for tensor, copy in zip(self._reads, self._copies, strict=False):
                same = torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
                assert same, "a tensor of a collective changed before the wait"
            self._finish(self._transport.collect(self._number))
        except BaseException as error:
            self._failure = error
            raise
        self._finish = None


def _reduce(parts: Copies, dtype: torch.dtype, op: Reduce) -> torch.Tensor:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total / len(parts) if op is Reduce.AVG else total
