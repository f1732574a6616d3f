"""Streams of random collectives over shared memory, each beside the same one over gloo.

The ranks of a group draw the same collectives from one seed. Each draws its own data, and waits in
its own order: the contract allows a wait long after the call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwise.transport.base import Label, Reduce, Transport, Work
from shardwise.transport.select import select_transport
from shardwise.transport.shm.transport import ShmTransport
from tests.transport.conformance import Item, held, random_item

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


class Params:
    """A group of parameters, as a transport sees it: items that are gathered again and again.

    Args:
        transport: the transport that gathers them.
        items: the items of the group.
        kinds: where the full of each item lives: ``"lent"`` or ``"heap"``.
    """

    def __init__(self, transport: Transport, items: list[Item], kinds: list[str]) -> None:
        self.items = items
        self._transport = transport
        self._lent = [i for i, kind in enumerate(kinds) if kind == "lent"]
        self._buffers = transport.full_buffers(
            [items[i].chunk * transport.world_size for i in self._lent],
            [items[i].result for i in self._lent],
            CPU,
        )

    def fulls(self) -> list[torch.Tensor]:
        """Return memory to gather into; memory that is not lent is new each time."""
        self._buffers.allocate()
        found = dict(zip(self._lent, self._buffers.tensors, strict=True))
        return [
            found[i]
            if i in found
            else torch.empty(item.chunk * self._transport.world_size, dtype=item.result)
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


@dataclass(eq=False)
class Flight:
    """A collective under way.

    Attributes:
        works: of ours, and of what it is compared with.
        check: compares, when all are over.
        params: what is gathered, if it is a gather.
    """

    works: list[Work]
    check: Callable[[], None]
    params: Params | None = None
    over: bool = field(default=False, init=False)

    def finish(self) -> None:
        """Wait and compare, the first time."""
        if not self.over:
            for work in self.works:
                work.wait()
            self.check()
            self.over = True


class Stream:
    """One rank's side of random collectives over one group.

    Args:
        group: whose transports are compared.
        seed: of all that ranks have to agree on.
        compared: do each over gloo too, and compare, bit for bit.
        largest: elements of the largest chunk.
    """

    def __init__(
        self, group: dist.ProcessGroup, seed: str, *, compared: bool = True, largest: int = 4000
    ) -> None:
        found = select_transport(group, CPU, "shm")
        assert isinstance(found, ShmTransport)
        self.transport = found
        self.started = 0
        self._gloo = select_transport(group, CPU, "c10d") if compared else None
        self._seed, self._largest = seed, largest
        self._rank, self._world_size = found.rank, found.world_size
        self.rewind()
        self._groups = [self._params() for _ in range(_GROUPS)]
        self._under_way: list[Flight] = []
        self._gathered: list[Flight] = []

    def rewind(self) -> None:
        """Draw the same again from here on."""
        self._same = random.Random(self._seed)
        self._own = random.Random(f"{self._seed}, rank {self._rank}")
        self._data = torch.Generator().manual_seed(self._own.randrange(2**31))

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
        idle = [each for each in self._groups if each not in self._in_use()]
        kind = self._same.choice(["gather", "scatter", "reduce"])
        if kind == "gather" and idle:
            self._gather(self._same.choice(idle))
        elif kind == "reduce":
            self._under_way.append(self._all_reduce())
        else:
            self._under_way.append(self._reduce_scatter())

    def finish(self) -> None:
        """Wait for all that was started, in random order; free all that was gathered."""
        self._own.shuffle(self._under_way)
        while self._under_way:
            self._end(self._under_way.pop())
        while self._gathered:
            self._retire()

    # -- inside --------------------------------------------------------------------------------

    def _in_use(self) -> list[Params | None]:
        return [flight.params for flight in self._gathered]

    def _end(self, flight: Flight) -> None:
        """Wait for a collective; or drop it, as an exception would."""
        if flight.params is not None or self._own.random() > 0.03:
            flight.finish()

    def _retire(self, *, again: bool = False) -> None:
        """Free the group that was gathered first; or gather it again as it is."""
        flight = self._gathered.pop(0)
        flight.finish()
        assert flight.params is not None
        flight.params.scribble(self._own)
        if again:
            self._gather(flight.params)
        else:
            flight.params.free()

    def _params(self) -> Params:
        items = self._items()
        kinds = [self._same.choice(["lent", "heap"]) for _ in items]
        if self._same.random() < 0.5:  # all alike, as those of most models
            kinds = kinds[:1] * len(items)
        return Params(self.transport, items, kinds)

    def _items(self) -> list[Item]:
        return [
            random_item(self._same, self._world_size, self._largest)
            for _ in range(self._same.randrange(_MOST_TENSORS))
        ]

    def _draw(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(numel, generator=self._data, dtype=wide).to(dtype)

    def _label(self) -> Label:
        return Label(f"blocks.{self.started}")

    def _gather(self, params: Params) -> None:
        items, size = params.items, self._world_size
        values = [self._draw(held(item, self._rank, size), item.stored) for item in items]
        fulls = params.fulls()
        works = [self.transport.all_gather(values, fulls, self._label())]
        expected: list[torch.Tensor] = []
        if self._gloo is not None:
            expected = [torch.empty(size * item.chunk, dtype=item.result) for item in items]
            works.append(self._gloo.all_gather(values, expected, self._label()))
        what = f"all-gather {self.started}"

        def check() -> None:
            for i, (full, theirs) in enumerate(zip(fulls, expected, strict=False)):
                for rank in range(size):
                    first = rank * items[i].chunk
                    part = slice(first, first + held(items[i], rank, size))
                    self._compare(full[part], theirs[part], f"{what}, chunk {rank}", i, items)

        flight = Flight(works, check, params)
        self._under_way.append(flight)
        self._gathered.append(flight)

    def _reduce_scatter(self) -> Flight:
        items, op = self._items(), self._same.choice(list(Reduce))
        numels = [max(0, item.chunk * self._world_size - item.missing) for item in items]
        fulls = [self._draw(n, item.stored) for n, item in zip(numels, items, strict=True)]
        shards = [torch.empty(item.chunk, dtype=item.result) for item in items]
        works = [self.transport.reduce_scatter(fulls, shards, op, self._label())]
        expected: list[torch.Tensor] = []
        if self._gloo is not None:
            expected = [torch.empty_like(shard) for shard in shards]
            works.append(self._gloo.reduce_scatter(fulls, expected, op, self._label()))
        what = f"reduce-scatter {self.started}, {op.name}"

        def check() -> None:
            for i, (shard, theirs) in enumerate(zip(shards, expected, strict=False)):
                filled = held(items[i], self._rank, self._world_size)
                self._compare(shard[:filled], theirs[:filled], what, i, items)

        return Flight(works, check)

    def _all_reduce(self) -> Flight:
        """Reduce; gloo's own adds in another order, so it only carries what is added here."""
        items, op, size = self._items(), self._same.choice(list(Reduce)), self._world_size
        tensors = [self._draw(item.chunk, item.result) for item in items]
        originals = [tensor.clone() for tensor in tensors]
        works = [self.transport.all_reduce(tensors, op, self._label())]
        parts: list[torch.Tensor] = []
        if self._gloo is not None:
            parts = [torch.empty(size * item.chunk, dtype=item.result) for item in items]
            works.append(self._gloo.all_gather(originals, parts, self._label()))
        what = f"all-reduce {self.started}, {op.name}"

        def check() -> None:
            for i, (tensor, part) in enumerate(zip(tensors, parts, strict=False)):
                first, *rest = part.view(size, -1)
                total = first.clone()
                for each in rest:
                    total += each
                if op is Reduce.AVG:
                    total /= size
                self._compare(tensor, total, what, i, items)

        return Flight(works, check)

    def _compare(
        self, found: torch.Tensor, expected: torch.Tensor, what: str, i: int, items: list[Item]
    ) -> None:
        if self._own.random() < 0.01:
            time.sleep(0.003)  # a slow reader, whose peers go on
        if torch.equal(found, expected):
            return
        first = int((found != expected).nonzero()[0])
        raise AssertionError(
            f"seed {self._seed!r}, {what}, tensor {i} of {len(items)} ({items[i]}), rank "
            f"{self._rank} of {self._world_size}: element {first} of {found.numel()} is "
            f"{found[first]}, over gloo {expected[first]}"
        )
