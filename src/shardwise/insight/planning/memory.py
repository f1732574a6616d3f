"""How much memory a rank needs, when it needs most, and what an allocator reserves for it.

Torch asks the driver of an accelerator for segments, gives parts of them to tensors, and keeps what
tensors have freed. A part that is free fits some tensors and not others, so more is reserved than
is ever allocated at once. How much more follows from the order in which tensors come and go: here a
log's changes go through the same rules.

Source: torch's ``CUDACachingAllocator`` in its default settings: blocks of 512 bytes, the smallest
free part that fits, segments of 2 MiB for up to 1 MiB, of 20 MiB for up to 10 MiB, and of the
tensor's own size, in steps of 2 MiB, above.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from shardwise.base.observe import Memory
from shardwise.base.units import counted
from shardwise.insight.planning.events import Change, Log

#: Bytes that a process on CPUs takes for each byte of its tensors at the peak: holes in the heap of
#: the C library, buffers of the libraries that multiply, what gloo allocates. Measured by
#: benchmarks/plan_memory.py: the median of 35 ranks of 16 trainings. The interpreter and torch
#: themselves come on top.
PROCESS_FACTOR = 1.28


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The memory of a rank at its peak.

    Attributes:
        parameters: bytes of the shards.
        gradients: bytes of gradients, sharded ones and full ones that are not yet reduced.
        optimizer: bytes of the optimizer's states.
        full_parameters: bytes of parameters that are gathered.
        transport: bytes of buffers, staging and scratch of collectives.
        activations: bytes that forward keeps for backward.
        other: bytes of logits, loss, gradients of activations, temporary results, buffers.
        peak: the sum of all.
        peak_moment: what the rank is doing then.
        ranks: how many ranks are of this kind.
        most: the most bytes of each kind during the step, each at a moment of its own.
        by_module: bytes of activations at the peak by module.
        offloaded: bytes of states, parameters and activations on the host or on a disk, not counted
            above.
    """

    parameters: int
    gradients: int
    optimizer: int
    full_parameters: int
    transport: int
    activations: int
    other: int
    peak: int
    peak_moment: str
    ranks: int
    most: Mapping[Memory, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    offloaded: int = 0


def memory(log: Log) -> RankBytes:
    """Find the peak of a step."""
    changes = [event for event in log.events if isinstance(event, Change)]
    before = {kind: log.before.get(kind, 0) for kind in Memory}
    now, most = Counter(before), dict(before)
    for change in changes:
        now[change.kind] += change.nbytes
        most[change.kind] = max(most[change.kind], now[change.kind])
    sizes = (change.nbytes for change in changes)
    totals = list(accumulate(sizes, initial=sum(before.values())))
    peak = max(totals)
    until = totals.index(peak)
    at_peak, held = Counter(before), Counter[tuple[Memory, str]]()
    for change in changes[:until]:
        at_peak[change.kind] += change.nbytes
        held[change.kind, change.module] += change.nbytes
    full = sum(1 for (kind, _), n in held.items() if kind is Memory.FULL_PARAMETERS and n)
    moment = changes[until - 1].moment if until else "between steps"
    unsharded = f", {counted(full, 'group')} full" if full else ""
    return RankBytes(
        **{kind.value: at_peak[kind] for kind in Memory},
        peak=peak,
        ranks=1,
        peak_moment=f"{moment}{unsharded}",
        most=most,
        by_module={m: n for (kind, m), n in held.items() if kind is Memory.ACTIVATIONS and n},
        offloaded=log.offloaded,
    )


# -- the caching allocator of an accelerator -------------------------------------------------------

_MIB = 2**20
_BLOCK = 512
_SMALL = _MIB  # the most bytes that come from small segments
_STEPS = 3  # after which what is reserved grows no more


class SegmentPart(NamedTuple):
    """A part of a segment; in this order, the allocator chooses between parts."""

    small: bool
    nbytes: int
    address: int


class CachingAllocator:
    """An allocator that keeps what is freed.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._end = 0  # of all addresses
        self._free: list[SegmentPart] = []  # ascending
        self._from: dict[int, SegmentPart] = {}  # the free ones, by their first address
        self._until: dict[int, SegmentPart] = {}  # and by the one behind them

    def allocate(self, nbytes: int) -> SegmentPart:
        """Return a part for a tensor."""
        nbytes = max(1, -(-nbytes // _BLOCK)) * _BLOCK
        small = nbytes <= _SMALL
        at = bisect.bisect_left(self._free, (small, nbytes, 0))
        if at < len(self._free) and self._free[at].small is small:
            part = self._forget_free(self._free[at])
        else:
            part = self._segment(nbytes, small)
        left = part.nbytes - nbytes
        if left < _BLOCK if small else left <= _SMALL:
            return part
        self._note_free(SegmentPart(small, left, part.address + nbytes))
        return part._replace(nbytes=nbytes)

    def free(self, part: SegmentPart) -> None:
        """Take a part back, and join it with free neighbors."""
        small, nbytes, address = part
        if (before := self._until.get(address)) is not None:
            address = self._forget_free(before).address
            nbytes += before.nbytes
        if (after := self._from.get(address + nbytes)) is not None:
            nbytes += self._forget_free(after).nbytes
        self._note_free(SegmentPart(small, nbytes, address))

    def _segment(self, nbytes: int, small: bool) -> SegmentPart:
        if small:
            size = 2 * _MIB
        elif nbytes < 10 * _MIB:
            size = 20 * _MIB
        else:
            size = -(-nbytes // (2 * _MIB)) * 2 * _MIB
        self.reserved += size
        part = SegmentPart(small, size, self._end)
        self._end += size + 1  # one more, since parts of two segments are no neighbors
        return part

    def _note_free(self, part: SegmentPart) -> None:
        bisect.insort(self._free, part)
        self._from[part.address] = self._until[part.address + part.nbytes] = part

    def _forget_free(self, part: SegmentPart) -> SegmentPart:
        del self._free[bisect.bisect_left(self._free, part)]
        del self._until[part.address + part.nbytes]
        return self._from.pop(part.address)


def reserved(log: Log) -> int:
    """Return the bytes that an accelerator's allocator has reserved after some steps of a log.

    The first step comes before there are optimizer states, as in a training: they then lie between
    what the step has left free.
    """
    allocator = CachingAllocator()
    for kind, nbytes in log.before.items():
        if kind is not Memory.OPTIMIZER and nbytes:
            allocator.allocate(nbytes)
    changes = [event for event in log.events if isinstance(event, Change)]
    held: dict[tuple[Memory, str, int], list[SegmentPart]] = defaultdict(list)
    for step in range(_STEPS):
        for change in changes:
            mine = held[change.kind, change.module, abs(change.nbytes)]
            if change.nbytes > 0:
                mine.append(allocator.allocate(change.nbytes))
            elif mine:  # else it was there before
                allocator.free(mine.pop())
        if step == 0:
            allocator.allocate(log.before.get(Memory.OPTIMIZER, 0))
    return allocator.reserved
