"""The contract of every transport, as checks that each rank runs against a plain reference.

Every rank draws the data of *all* ranks from the same seed, so it can compute by itself what the
collective has to return.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.transport.base import Label, Reduce, Transport, Work

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

    def read(self, flight: Flight, pause: float) -> None:
        """Look at what has arrived, after some seconds."""
        time.sleep(pause)
        flight.check()

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


class Unread(Checks):
    """Reads nothing of what arrives: ranks stay in step."""

    def read(self, flight: Flight, pause: float) -> None:
        """Go on."""


class Flight:
    """A collective under way.

    Args:
        checks: of this rank.
        items: the tensors of the call.
        seed: of the data of all ranks.
    """

    def __init__(self, checks: Checks, items: Sequence[Item], seed: int) -> None:
        self.checks, self.items, self.seed = checks, items, seed
        self.label = Label(f"blocks.{seed}")
        self._work: Work | None = self.start()

    def start(self) -> Work:
        """Make the call."""
        raise NotImplementedError

    def check(self) -> None:
        """Compare what has arrived with what should have."""
        raise NotImplementedError

    def finish(self, pause: float = 0.0) -> None:
        """Wait, pause for some seconds, and read; only the first time."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.checks.read(self, pause)

    def drawn(self, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[list[Tensor]]:
        """For each tensor, the values of each rank."""
        pairs = zip(numels, dtypes, strict=True)
        return [self.checks.draw(*pair, self.seed, i) for i, pair in enumerate(pairs)]


class AllGather(Flight):
    """An all-gather under way, into given memory, or into new memory that the transport lends."""

    def __init__(
        self, checks: Checks, items: Sequence[Item], seed: int, fulls: list[Tensor] | None = None
    ) -> None:
        self.fulls = fulls
        super().__init__(checks, items, seed)

    def start(self) -> Work:
        """Gather what the tail does not lack."""
        rank, size = self.checks.rank, self.checks.world_size
        rows = self.drawn([item.chunk for item in self.items], [i.stored for i in self.items])
        self._values = [
            [row[: held(item, rank, size)] for rank, row in enumerate(each)]
            for item, each in zip(self.items, rows, strict=True)
        ]
        if self.fulls is None:
            numels, dtypes = [i.chunk * size for i in self.items], [i.result for i in self.items]
            cpu = torch.device("cpu")
            self._buffers = self.checks.transport.full_buffers(numels, dtypes, cpu)
            self._buffers.allocate()
            self.fulls = list(self._buffers.tensors)
        shards = [values[rank].clone() for values in self._values]
        return self.checks.transport.all_gather(shards, self.fulls, self.label)

    def check(self) -> None:
        """Each chunk is its rank's values."""
        assert self.fulls is not None
        for i, (item, full) in enumerate(zip(self.items, self.fulls, strict=True)):
            for rank, values in enumerate(self._values[i]):
                found = full[rank * item.chunk :][: values.numel()]
                expected = self.checks.gathered(values, item.result)
                assert torch.equal(found, expected), (
                    f"all-gather {self.seed}, chunk {rank} of tensor {i} ({item}) on rank "
                    f"{self.checks.rank} of {self.checks.world_size}: found {found}, expected "
                    f"{expected}"
                )


class ReduceScatter(Flight):
    """A reduce-scatter under way."""

    def __init__(self, checks: Checks, items: Sequence[Item], seed: int, op: Reduce) -> None:
        self.op = op
        super().__init__(checks, items, seed)

    def start(self) -> Work:
        """Reduce what the tail does not lack."""
        size = self.checks.world_size
        numels = [max(0, item.chunk * size - item.missing) for item in self.items]
        self._values = self.drawn(numels, [item.stored for item in self.items])
        self._fulls = [values[self.checks.rank].clone() for values in self._values]
        self._shards = [torch.empty(item.chunk, dtype=item.result) for item in self.items]
        return self.checks.transport.reduce_scatter(self._fulls, self._shards, self.op, self.label)

    def check(self) -> None:
        """What this rank has is its part of the sum, and no gradient has changed."""
        rank = self.checks.rank
        for i, (item, values) in enumerate(zip(self.items, self._values, strict=True)):
            assert torch.equal(self._fulls[i], values[rank]), f"full {i} was written"
            mine = slice(rank * item.chunk, (rank + 1) * item.chunk)
            expected = self.checks.reduce(values, item.result, self.op)[mine]
            what = f"reduce-scatter {self.seed}, {self.op.name}, of tensor {i}, {item}"
            self.checks.compare(self._shards[i][: expected.numel()], expected, what)


class AllReduce(ReduceScatter):
    """An all-reduce under way."""

    def start(self) -> Work:
        """Reduce whole chunks."""
        self._values = self.drawn([i.chunk for i in self.items], [i.result for i in self.items])
        self._tensors = [values[self.checks.rank].clone() for values in self._values]
        return self.checks.transport.all_reduce(self._tensors, self.op, self.label)

    def check(self) -> None:
        """What this rank has is the sum."""
        in_order = self.checks.transport.name in ("shm", "local")  # others leave it to a backend
        checks = self.checks if in_order else self.checks.inexact()
        for i, (item, values) in enumerate(zip(self.items, self._values, strict=True)):
            expected = checks.reduce(values, item.result, self.op)
            what = f"all-reduce {self.seed}, {self.op.name}, of tensor {i}, {item}"
            checks.compare(self._tensors[i], expected, what)


def held(item: Item, rank: int, world_size: int) -> int:
    """Elements of a rank's chunk that are not missing from the tail."""
    return max(0, min(item.chunk, item.chunk * world_size - item.missing - rank * item.chunk))


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
            AllGather(checks, items, number).finish()
            for op in Reduce:
                ReduceScatter(checks, items, number, op).finish()
                AllReduce(checks, items, number, op).finish()
        except AssertionError as error:
            raise AssertionError(f"case {name!r}: {error}") from error
