"""The contract of every transport, as checks that each rank runs against a plain reference.

Every rank draws the data of *all* ranks from the same seed, so it can compute by itself what the
collective has to return.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.transport.base import Reduce, Transport, Work

# A backend that reduces in its own order may differ by a few roundings.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
DTYPES = list(TOLERANCE)
# Reduced in -> stored in.
REDUCTIONS = [(dtype, dtype) for dtype in DTYPES] + [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
]


@dataclass(frozen=True)
class Item:
    """One tensor of a call.

    Attributes:
        chunk: elements per rank.
        missing: elements that the tail of the full lacks.
        stored: dtype of what each rank has.
        result: dtype of what each rank gets.
    """

    chunk: int
    missing: int = 0
    stored: torch.dtype = torch.float32
    result: torch.dtype = torch.float32


@functools.cache
def _random(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers to cut values from: drawing new ones for every tensor would take too long."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=dtype)


class Checks:
    """One rank's side of the checks.

    Args:
        transport: what to check.
        exact: whether reductions add in the order of ranks, to the last bit.
    """

    def __init__(self, transport: Transport, *, exact: bool) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.exact = exact

    def inexact(self) -> Checks:
        """The same without the last bits."""
        return Checks(self.transport, exact=False)

    def all_gather(self, items: Sequence[Item], seed: int) -> AllGather:
        return AllGather(self, items, seed)

    def reduce_scatter(self, items: Sequence[Item], op: Reduce, seed: int) -> ReduceScatter:
        return ReduceScatter(self, items, op, seed)

    def all_reduce(self, items: Sequence[Item], op: Reduce, seed: int) -> AllReduce:
        return AllReduce(self, items, op, seed)

    def gathered(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What every rank gets of a rank's values."""
        return values.to(dtype)

    def draw(self, numel: int, dtype: torch.dtype, *seeds: int) -> list[torch.Tensor]:
        """Values of every rank."""
        wide = torch.complex128 if dtype.is_complex else torch.float64
        start = random.Random(hash((*seeds, numel)))
        pool = _random(1 << max(18, (2 * numel).bit_length()), wide)
        places = [start.randrange(len(pool) - numel) for _ in range(self.world_size)]
        return [pool[place:][:numel].to(dtype, copy=True) for place in places]

    def reduce(self, parts: list[torch.Tensor], dtype: torch.dtype, op: Reduce) -> torch.Tensor:
        """The sum in the order of ranks, each addition in ``dtype``."""
        total = parts[0].to(dtype)
        for part in parts[1:]:
            total = total + part.to(dtype)
        return total / self.world_size if op is Reduce.AVG else total

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        if found.dtype == expected.dtype and torch.equal(found, expected):
            return  # as nearly always, and many times faster
        tolerance = 0.0 if self.exact else TOLERANCE[expected.dtype]
        torch.testing.assert_close(
            found,
            expected,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text: f"{what} on rank {self.rank} of {self.world_size}: {text}",
        )


class AllGather:
    """An all-gather under way; :meth:`finish` checks it."""

    def __init__(self, checks: Checks, items: Sequence[Item], seed: int) -> None:
        self._checks = checks
        self._items = items
        world_size = checks.world_size
        self._values = []
        for i, item in enumerate(items):
            rows = checks.draw(item.chunk, item.stored, seed, i)
            ends = [held(item, rank, world_size) for rank in range(world_size)]
            self._values.append([row[:end] for row, end in zip(rows, ends, strict=True)])
        self._shards = [values[checks.rank].clone() for values in self._values]
        self._buffers = checks.transport.full_buffers(
            [item.chunk * world_size for item in items],
            [item.result for item in items],
            torch.device("cpu"),
        )
        self._finished = False
        self._buffers.allocate()
        self._work: Work = checks.transport.all_gather(self._shards, self._buffers.tensors)

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._work.wait()
        for i, (item, full) in enumerate(zip(self._items, self._buffers.tensors, strict=True)):
            for rank, values in enumerate(self._values[i]):
                found = full[rank * item.chunk :][: values.numel()]
                expected = self._checks.gathered(values, item.result)
                assert torch.equal(found, expected), (
                    f"chunk {rank} of tensor {i} ({item}) on rank {self._checks.rank} of "
                    f"{self._checks.world_size}: found {found}, expected {expected}"
                )

    def free(self) -> None:
        """Free what was gathered into; all ranks do so in the same order."""
        self._buffers.free()


class ReduceScatter:
    """A reduce-scatter under way; :meth:`finish` checks it."""

    def __init__(self, checks: Checks, items: Sequence[Item], op: Reduce, seed: int) -> None:
        self._checks = checks
        self._items = items
        self._op = op
        self._values = []
        for i, item in enumerate(items):
            numel = max(0, item.chunk * checks.world_size - item.missing)
            self._values.append(checks.draw(numel, item.stored, seed, i))
        self._fulls = [values[checks.rank].clone() for values in self._values]
        self._shards = [torch.empty(item.chunk, dtype=item.result) for item in items]
        self._work: Work = checks.transport.reduce_scatter(self._fulls, self._shards, op)

    def finish(self) -> None:
        checks = self._checks
        self._work.wait()
        for i, (item, values) in enumerate(zip(self._items, self._values, strict=True)):
            assert torch.equal(self._fulls[i], values[checks.rank]), f"full {i} was written"
            mine = slice(checks.rank * item.chunk, (checks.rank + 1) * item.chunk)
            expected = checks.reduce(values, item.result, self._op)[mine]
            found = self._shards[i][: expected.numel()]
            checks.compare(found, expected, f"reduce-scatter {self._op.name} of tensor {i}, {item}")


class AllReduce:
    """An all-reduce under way; :meth:`finish` checks it."""

    def __init__(self, checks: Checks, items: Sequence[Item], op: Reduce, seed: int) -> None:
        self._checks = checks
        self._items = items
        self._op = op
        self._values = [
            checks.draw(item.chunk, item.result, seed, i) for i, item in enumerate(items)
        ]
        self._tensors = [values[checks.rank].clone() for values in self._values]
        self._work: Work = checks.transport.all_reduce(self._tensors, op)

    def finish(self) -> None:
        self._work.wait()
        for i, (item, values) in enumerate(zip(self._items, self._values, strict=True)):
            expected = self._checks.reduce(values, item.result, self._op)
            what = f"all-reduce {self._op.name} of tensor {i}, {item}"
            # Backends add in an order of their own.
            self._checks.inexact().compare(self._tensors[i], expected, what)


def held(item: Item, rank: int, world_size: int) -> int:
    """Elements of a rank's chunk that are not missing from the tail."""
    return max(0, min(item.chunk, item.chunk * world_size - item.missing - rank * item.chunk))


def fuzz(checks: Checks, rounds: int, seed: int, largest: int) -> None:
    """Run random collectives, several under way at once, waited for in random order.

    Args:
        checks: this rank's.
        rounds: how many collectives.
        seed: the same on every rank, for all but the order of the waits.
        largest: elements of the largest chunk.
    """
    same, own = random.Random(seed), random.Random(seed + 1 + checks.rank)
    gathers: list[AllGather] = []
    under_way: list[AllGather | ReduceScatter | AllReduce] = []
    for number in range(rounds):
        items = [random_item(same, checks.world_size, largest) for _ in range(same.randrange(8))]
        op = same.choice(list(Reduce))
        kind = same.choice(["gather", "scatter", "reduce"])
        if kind == "gather":
            gathers.append(checks.all_gather(items, number))
            under_way.append(gathers[-1])
        elif kind == "scatter":
            under_way.append(checks.reduce_scatter(items, op, number))
        else:
            under_way.append(checks.all_reduce(items, op, number))
        while len(under_way) > same.randrange(4):
            under_way.pop(own.randrange(len(under_way))).finish()
        while len(gathers) > 4:
            oldest = gathers.pop(0)
            oldest.finish()
            oldest.free()
    for each in under_way:
        each.finish()


def random_item(random: random.Random, world_size: int, largest: int) -> Item:
    chunk = random.choice([0, 1, 2, random.randrange(100), random.randrange(largest)])
    result, stored = random.choice(REDUCTIONS)
    missing = random.choice([0, 0, random.randrange(chunk * world_size + 1)])
    return Item(chunk, missing, stored, result)


def cases(large: int) -> list[tuple[str, list[Item]]]:
    """Named lists of tensors: the corners, one by one.

    Args:
        large: elements of a chunk that is not packed.
    """
    named = [
        ("nothing", []),
        ("one element", [Item(1)]),
        ("empty tensors", [Item(0), Item(0, stored=torch.bfloat16), Item(5), Item(0)]),
        ("one small", [Item(10)]),
        ("many small", [Item(n) for n in range(40)]),
        ("one large", [Item(large)]),
        ("large and small", [Item(3), Item(large), Item(7), Item(large + 1), Item(0), Item(2)]),
        ("uneven", [Item(7, missing=3), Item(large, missing=large + 5), Item(4, missing=4)]),
        ("fewer rows than ranks", [Item(large, missing=large), Item(1, missing=1)]),
        ("nothing but padding", [Item(3, missing=3), Item(5)]),
    ]
    for result, stored in REDUCTIONS:
        items = [Item(11, 2, stored, result), Item(large, 9, stored, result)]
        named.append((f"{stored} as {result}", [*items, Item(6, 0, stored, result)]))
    mixed = [Item(n, 1, stored, result) for n in (9, 200) for result, stored in REDUCTIONS]
    return [*named, ("all dtypes", mixed)]


def check_all(transport: Transport, *, exact: bool, large: int = 1500) -> None:
    """Run every case through every collective."""
    check_cases(Checks(transport, exact=exact), large)


def check_cases(checks: Checks, large: int = 1500) -> None:
    """The same with checks of the caller's."""
    for number, (name, items) in enumerate(cases(large)):
        try:
            checks.all_gather(items, number).finish()
            for op in Reduce:
                checks.reduce_scatter(items, op, number).finish()
                checks.all_reduce(items, op, number).finish()
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from error
