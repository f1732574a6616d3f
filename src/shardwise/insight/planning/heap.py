"""What glibc's heap takes on CPUs for the memory of a step.

Torch gets host memory from the C library. Trainings have it keep what is freed
(:func:`shardwise.base.devices.keep_freed_memory`), so that the heap of a rank stays as large as it
ever was. It is larger than the tensors that lie in it at any time, because what is free fits some
tensors and not others. Here a log's changes go through the rules of glibc's allocator.

Small objects decide how much is lost. Torch asks for addresses at multiples of 64. To get one,
glibc takes up to 96 bytes more than it needs, and frees them again on both sides. What small object
comes next gets them. When the tensor is freed, that object keeps its memory apart from what is free
beside it, and a tensor of the same size does not fit there again: it needs those bytes, too. Such
objects are what describes a tensor, and what autograd notes of every operation until backward is
over.

Source: glibc's ``malloc.c`` in version 2.36. The smallest free chunk that fits is taken; of large
ones of one size, the one that was freed last, so that the others grow together. A chunk that is
freed is joined with free neighbors at once. Small ones are not: they wait in lists for their size.
From a threshold on, what fits into no free chunk is mapped apart.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

from shardwise.base.devices import MOST_IN_HEAP
from shardwise.base.observe import Memory
from shardwise.insight.planning.events import Change, Log, Op, StepPhase, StorageRegion

_STEPS = 6  # after which a heap has hardly ever grown
_THREADS = 2  # of gloo, each with a heap of its own

#: Bytes of the objects that describe a tensor, as long as its memory lives.
_OF_TENSOR = (96, 176)
#: Bytes of the objects that autograd makes for an operation of forward, on the average.
_OF_OPERATION = (16, 16, 16, 16, 24, 24, 24, 32, 176, 312)

_PAGE = 4096
_HEADER = 8  # of a chunk
_UNIT = 16  # sizes of chunks are multiples of it
_SMALLEST = 32
_ALIGNMENT = 64  # of tensors
_TOP_PAD = 128 * 1024  # the heap grows by so much more than is asked for
_CACHED, _CACHED_CHUNKS = (
    1040,
    7,
)  # the largest chunks that wait for a thread; the count of one size
_FAST = 128  # the largest chunks that wait until a large one is asked for
_LARGE = 1024  # chunks that count as large then
_JOINS = 64 * 1024  # bytes; a free chunk of this size ends the wait, too


class Heap:
    """A heap of glibc that gives nothing back to the system.

    Attributes:
        nbytes: of the heap. It never shrinks.
        mapped: bytes of chunks that are mapped apart now.
    """

    def __init__(self) -> None:
        self.nbytes = self.mapped = 0
        self._top = 0  # where the part begins that was never used, or is free again
        self._free: list[tuple[int, int, int]] = []  # by size, then by age; with the address
        self._noted: dict[int, tuple[int, int, int]] = {}  # the same, by address
        self._ages = 0
        self._ends: dict[int, int] = {}  # where the free chunk begins that ends there
        self._cached: dict[int, list[int]] = defaultdict(list)
        self._fast: dict[int, list[int]] = {}
        self._used: dict[int, int] = {}
        self._maps = 0

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new chunk."""
        size = _size_of(nbytes)
        cached = self._cached.get(size)
        if cached:
            address = cached.pop()
        else:
            address, size = self._find(size)
        self._used[address] = size
        return address

    def allocate_aligned(self, nbytes: int) -> int:
        """Return the address of a new chunk for a tensor."""
        size = _size_of(nbytes)
        address, found = self._find(_size_of(size + _ALIGNMENT + _SMALLEST))
        if address >= 0:
            before = -(address + 2 * _HEADER) % _ALIGNMENT
            if before:
                before += _ALIGNMENT if before < _SMALLEST else 0
                self._release(address, before)
                address, found = address + before, found - before
            if found - size > _SMALLEST:
                self._release(address + size, found - size)
                found = size
        self._used[address] = found
        return address

    def free(self, address: int) -> None:
        """Take a chunk back."""
        size = self._used.pop(address)
        if address < 0:
            self.mapped -= size
        else:
            self._release(address, size)

    def _find(self, size: int) -> tuple[int, int]:
        """Return address and size of a chunk; the address is negative if it is mapped apart."""
        waiting = self._fast.get(size)
        if waiting:
            return waiting.pop(), size
        if size >= _LARGE:
            self._join_fast()
        while True:
            at = bisect.bisect_left(self._free, (size,))
            if at < len(self._free):
                found, _, address = self._free[at]
                self._forget(address)
                if found - size < _SMALLEST:
                    return address, found
                self._note(address + size, found - size)
                return address, size
            if self.nbytes - self._top >= size + _SMALLEST:
                self._top += size
                return self._top - size, size
            if self._fast:
                self._join_fast()
            elif size >= MOST_IN_HEAP:
                return self._map(size)
            else:
                missing = size + _TOP_PAD + _SMALLEST - (self.nbytes - self._top)
                self.nbytes += -(-missing // _PAGE) * _PAGE

    def _map(self, size: int) -> tuple[int, int]:
        size = -(-(size + _HEADER) // _PAGE) * _PAGE
        self.mapped += size
        self._maps += 1
        return -self._maps, size

    def _release(self, address: int, size: int) -> None:
        if size <= _CACHED and len(self._cached[size]) < _CACHED_CHUNKS:
            self._cached[size].append(address)
        elif size <= _FAST:
            self._fast.setdefault(size, []).append(address)
        elif self._join(address, size) >= _JOINS:
            self._join_fast()

    def _join_fast(self) -> None:
        waiting, self._fast = self._fast, {}
        for size, addresses in waiting.items():
            for address in addresses:
                self._join(address, size)

    def _join(self, address: int, size: int) -> int:
        """Free a chunk, together with free neighbors; return the size of all."""
        before = self._ends.get(address)
        if before is not None:
            size += self._forget(before)
            address = before
        if address + size == self._top:
            self._top = address
            return size
        if address + size in self._noted:
            size += self._forget(address + size)
        self._note(address, size)
        return size

    def _note(self, address: int, size: int) -> None:
        """Note a free chunk. Of large ones of a size, the last one is taken first."""
        self._ages += 1
        noted = (size, -self._ages if size >= _LARGE else self._ages, address)
        bisect.insort(self._free, noted)
        self._noted[address] = noted
        self._ends[address + size] = address

    def _forget(self, address: int) -> int:
        """Take a chunk off the list of free ones; return its size."""
        noted = self._noted.pop(address)
        del self._free[bisect.bisect_left(self._free, noted)], self._ends[address + noted[0]]
        return noted[0]


def _size_of(nbytes: int) -> int:
    """Return the size of a chunk for ``nbytes``."""
    return max(_SMALLEST, -(-(nbytes + _HEADER) // _UNIT) * _UNIT)


class _HeapReplay:
    """Steps of a log on the heap of a process.

    Threads of a backend have heaps of their own, each as large as the largest tensor that was ever
    in it: a thread allocates one at a time.

    Attributes:
        most: the most bytes of all heaps so far, and of what is mapped apart.
    """

    def __init__(self, log: Log) -> None:
        self.most = 0
        self._log = log
        self._own, self._thread = Heap(), 0
        self._held: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        self._phase = StepPhase.OPTIMIZER
        self._noted: dict[StepPhase, list[int]] = defaultdict(list)  # by autograd
        self._states = [each for each in log.storages if each.kind is Memory.OPTIMIZER]
        for change in log.storages:
            if change.kind is not Memory.OPTIMIZER:
                self._change(change)

    def step(self) -> None:
        """Take a step. The first one makes the optimizer's states."""
        for event in self._log.events:
            if isinstance(event, Op):
                self._compute(event)
            elif isinstance(event, Change):
                if self._states and event.moment == "optimizer":
                    for state in self._states:
                        self._change(state)
                    self._states = []
                self._change(event)

    def _compute(self, op: Op) -> None:
        """Allocate and free what autograd notes.

        The graph of forward is there until backward is over. That of recomputation goes before the
        backward that it is for.
        """
        if op.phase is not self._phase:
            if self._phase is StepPhase.RECOMPUTE:
                self._forget(StepPhase.RECOMPUTE)
            if op.phase in (StepPhase.FORWARD, StepPhase.OPTIMIZER):
                self._forget(StepPhase.FORWARD)
            self._phase = op.phase
        if op.phase in (StepPhase.FORWARD, StepPhase.RECOMPUTE) and not op.runtime:
            self._noted[op.phase] += map(self._own.allocate, _OF_OPERATION)

    def _forget(self, phase: StepPhase) -> None:
        for address in self._noted.pop(phase, ()):
            self._own.free(address)

    def _change(self, change: Change) -> None:
        if change.place is StorageRegion.SHARED:
            return
        if change.place is StorageRegion.THREADS:
            if self._thread < change.nbytes < MOST_IN_HEAP:
                self._thread = change.nbytes
            return
        held = self._held[change.storage]
        if change.nbytes > 0:
            objects = map(self._own.allocate, _OF_TENSOR)
            held.append((self._own.allocate_aligned(change.nbytes), *objects))
            now = self._own.nbytes + self._own.mapped + _THREADS * self._thread
            self.most = max(self.most, now)
        elif held:
            for address in held.pop():
                self._own.free(address)


def process_bytes(log: Log) -> int:
    """Return the bytes of a rank's own memory at its peak, after some steps of a log.

    The first step comes before there are optimizer states, as in a training: they then lie between
    what the step has left free.
    """
    replay = _HeapReplay(log)
    for _ in range(_STEPS):
        replay.step()
    return replay.most


def shared_bytes(log: Log) -> int:
    """Return the bytes of a rank's part of the memory that ranks share, which never shrinks."""
    changes = (each for each in log.events if isinstance(each, Change))
    every = (each for each in (*log.storages, *changes) if each.place is StorageRegion.SHARED)
    return sum(each.nbytes for each in every)
