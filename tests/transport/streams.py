"""Streams of random collectives, each with the result that the contract asks for.

The ranks of a group draw the same collectives from one seed. Each waits in its own order, and reads
when it likes: the contract allows a wait long after the call.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from shardwise.transport.base import Reduce, Transport
from shardwise.transport.select import select_transport
from shardwise.transport.shm.transport import ShmTransport
from tests.transport.conformance import (
    REDUCTIONS,
    AllGather,
    AllReduce,
    Checks,
    Flight,
    Item,
    ReduceScatter,
)

CPU = torch.device("cpu")
_GROUPS = 6
_MOST_UNDER_WAY = 5
_MOST_GATHERED = 4
_MOST_TENSORS = 7


def world_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def over_shm(
    group: dist.ProcessGroup, seed: str, kind: type[Checks] = Checks, largest: int = 4000
) -> Stream:
    """A stream over shared memory."""
    transport = select_transport(group, CPU, "shm")
    assert isinstance(transport, ShmTransport)
    return Stream(kind(transport, exact=True), seed, largest)


def fuzz(checks: Checks, rounds: int, seed: int, largest: int) -> None:
    """Run random collectives, several under way at once, waited for in random order."""
    stream = Stream(checks, str(seed), largest)
    for _ in range(rounds):
        stream.step()
    stream.finish()


class Params:
    """A group of parameters, as a transport sees it: items that are gathered again and again.

    Args:
        transport: the transport that gathers them.
        items: the items of the group.
        kinds: where the full of each item lives: ``"lent"`` or ``"heap"``.
    """

    def __init__(self, transport: Transport, items: list[Item], kinds: list[str]) -> None:
        self.items = items
        self._size = transport.world_size
        self._lent = [i for i, kind in enumerate(kinds) if kind == "lent"]
        self._buffers = transport.full_buffers(
            [items[i].chunk * self._size for i in self._lent],
            [items[i].result for i in self._lent],
            CPU,
        )

    def fulls(self) -> list[torch.Tensor]:
        """Return memory to gather into; memory that is not lent is new each time."""
        self._buffers.allocate()
        found = dict(zip(self._lent, self._buffers.tensors, strict=True))
        return [
            found[i] if i in found else torch.empty(item.chunk * self._size, dtype=item.result)
            for i, item in enumerate(self.items)
        ]

    def scribble(self, own: random.Random) -> None:
        """Write values to fulls that no peer may see and no later gather may find."""
        for full in self._buffers.tensors:
            if full.numel() and own.random() < 0.5:
                full[own.randrange(full.numel())] = 77

    def free(self) -> None:
        """Free the lent memory."""
        self._buffers.free()


class Stream:
    """One rank's side of random collectives over one group.

    Args:
        checks: of this rank.
        seed: of all that ranks have to agree on.
        largest: elements of the largest chunk.
    """

    def __init__(self, checks: Checks, seed: str, largest: int) -> None:
        self.checks, self.transport = checks, checks.transport
        self.started = 0
        self._seed, self._largest = seed, largest
        self.rewind()
        self._groups = [self._params() for _ in range(_GROUPS)]
        self._under_way: list[Flight] = []
        self._gathered: list[tuple[Params, AllGather]] = []

    def rewind(self) -> None:
        """Draw the same again from here on."""
        self._same = random.Random(self._seed)
        self._own = random.Random(f"{self._seed}, rank {self.checks.rank}")

    def step(self) -> None:
        """Start a collective; wait for some that were started before."""
        self.start()
        most = self._same.randrange(_MOST_UNDER_WAY)
        while len(self._under_way) > most:
            self._end(self._under_way.pop(self._own.randrange(len(self._under_way))))
        most = self._same.randrange(_MOST_GATHERED)
        while len(self._gathered) > most:
            self._retire(again=self._same.random() < 0.2)

    def start(self) -> None:
        """Start a collective."""
        self.started += 1
        in_use = [params for params, _ in self._gathered]
        idle = [each for each in self._groups if each not in in_use]
        kind = self._same.choice([AllGather, ReduceScatter, AllReduce])
        if kind is AllGather and idle:
            self._gather(self._same.choice(idle))
            return
        reduction = AllReduce if kind is AllReduce else ReduceScatter
        op, seed = self._same.choice(list(Reduce)), self._same.randrange(2**31)
        self._under_way.append(reduction(self.checks, self._items(), seed, op))

    def finish(self) -> None:
        """Wait for all that was started, in random order; free all that was gathered."""
        self._own.shuffle(self._under_way)
        while self._under_way:
            self._end(self._under_way.pop())
        while self._gathered:
            self._retire()

    # -- inside --------------------------------------------------------------------------------

    def _end(self, flight: Flight) -> None:
        """Wait for a collective; or drop it, as an exception would."""
        if isinstance(flight, AllGather) or self._own.random() > 0.03:
            # Now and then a slow reader, whose peers go on.
            flight.finish(pause=0.003 if self._own.random() < 0.03 else 0.0)

    def _gather(self, params: Params) -> None:
        seed = self._same.randrange(2**31)
        flight = AllGather(self.checks, params.items, seed, params.fulls())
        self._under_way.append(flight)
        self._gathered.append((params, flight))

    def _retire(self, *, again: bool = False) -> None:
        """Free the group that was gathered first; or gather it again as it is."""
        params, flight = self._gathered.pop(0)
        flight.finish()
        params.scribble(self._own)
        if again:
            self._gather(params)
        else:
            params.free()

    def _params(self) -> Params:
        items = self._items()
        kinds = [self._same.choice(["lent", "heap"]) for _ in items]
        if self._same.random() < 0.5:  # all alike, as those of most models
            kinds = kinds[:1] * len(items)
        return Params(self.transport, items, kinds)

    def _items(self) -> list[Item]:
        return [self._item() for _ in range(self._same.randrange(_MOST_TENSORS))]

    def _item(self) -> Item:
        same, largest = self._same, self._largest
        chunk = same.choice([0, 1, 2, same.randrange(100), same.randrange(largest)])
        result, stored = same.choice(REDUCTIONS)
        missing = same.choice([0, 0, same.randrange(chunk * self.checks.world_size + 1)])
        return Item(chunk, missing, stored, result)
