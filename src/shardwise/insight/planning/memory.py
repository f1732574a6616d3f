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
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        offloaded: bytes of states and parameters on the host or on a disk, not counted above.
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
    now = {kind: log.before.get(kind, 0) for kind in Memory}
    modules: dict[str, int] = {}
    groups: dict[str, int] = {}
    most, total = dict(now), sum(now.values())
    peak, moment = total, "between steps"
    at_peak, by_module, full = dict(now), dict(modules), 0
    risen = False  # since the last peak was noted
    for event in log.events:
        if not isinstance(event, Change):
            continue
        if event.nbytes < 0 and risen:
            at_peak, by_module = dict(now), {k: v for k, v in modules.items() if v}
            full = sum(1 for nbytes in groups.values() if nbytes)
            risen = False
        now[event.kind] += event.nbytes
        total += event.nbytes
        if event.kind is Memory.ACTIVATIONS:
            modules[event.module] = modules.get(event.module, 0) + event.nbytes
        elif event.kind is Memory.FULL_PARAMETERS:
            groups[event.module] = groups.get(event.module, 0) + event.nbytes
        most[event.kind] = max(most[event.kind], now[event.kind])
        if total > peak:
            peak, moment, risen = total, event.moment, True
    if risen:
        at_peak, by_module = dict(now), {k: v for k, v in modules.items() if v}
        full = sum(1 for nbytes in groups.values() if nbytes)
    unsharded = f", {counted(full, 'group')} full" if full else ""
    return RankBytes(
        **{kind.value: at_peak[kind] for kind in Memory},
        peak=peak,
        ranks=1,
        peak_moment=f"{moment}{unsharded}",
        most=most,
        by_module=by_module,
        offloaded=log.offloaded,
    )


# -- the caching allocator of an accelerator -------------------------------------------------------

_MIB = 2**20
_BLOCK = 512
_SMALL = _MIB  # the most bytes that come from small segments
_STEPS = 3  # after which what is reserved grows no more


@dataclass(eq=False, slots=True)
class _SegmentPart:
    """A part of a segment, between its neighbors."""

    nbytes: int
    small: bool
    before: _SegmentPart | None = None
    after: _SegmentPart | None = None
    number: int = 0  # among the free ones; 0: it is not free


class CachingAllocator:
    """An allocator that keeps what is freed.

    Attributes:
        reserved: bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._free: list[tuple[bool, int, int, _SegmentPart]] = []
        self._numbers = 0

    def allocate(self, nbytes: int) -> _SegmentPart:
        """Return a part for a tensor."""
        nbytes = max(1, -(-nbytes // _BLOCK)) * _BLOCK
        small = nbytes <= _SMALL
        at = bisect.bisect_left(self._free, (small, nbytes, 0))
        if at < len(self._free) and self._free[at][0] is small:
            part = self._free.pop(at)[3]
            part.number = 0
        else:
            part = self._segment(nbytes, small)
        left = part.nbytes - nbytes
        if left >= _BLOCK if small else left > _SMALL:
            rest = _SegmentPart(left, small, before=part, after=part.after)
            if rest.after is not None:
                rest.after.before = rest
            part.after, part.nbytes = rest, nbytes
            self._note_free(rest)
        return part

    def free(self, part: _SegmentPart) -> None:
        """Take a part back, and join it with free neighbors."""
        before, after = part.before, part.after
        if before is not None and before.number:
            self._forget_free(before)
            before.nbytes += part.nbytes
            before.after = after
            if after is not None:
                after.before = before
            part = before
        if after is not None and after.number:
            self._forget_free(after)
            part.nbytes += after.nbytes
            part.after = after.after
            if part.after is not None:
                part.after.before = part
        self._note_free(part)

    def _segment(self, nbytes: int, small: bool) -> _SegmentPart:
        if small:
            size = 2 * _MIB
        elif nbytes < 10 * _MIB:
            size = 20 * _MIB
        else:
            size = -(-nbytes // (2 * _MIB)) * 2 * _MIB
        self.reserved += size
        return _SegmentPart(size, small)

    def _note_free(self, part: _SegmentPart) -> None:
        self._numbers += 1
        part.number = self._numbers
        bisect.insort(self._free, (part.small, part.nbytes, part.number, part))

    def _forget_free(self, part: _SegmentPart) -> None:
        at = bisect.bisect_left(self._free, (part.small, part.nbytes, part.number))
        del self._free[at]
        part.number = 0


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
    held: dict[tuple[Memory, str, int], list[_SegmentPart]] = defaultdict(list)
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
