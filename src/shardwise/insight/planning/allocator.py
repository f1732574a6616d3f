"""What the caching allocator of an accelerator reserves for the memory of a step.

Torch asks the driver for segments, gives parts of them to tensors, and keeps what tensors have
freed. A part that is free fits some tensors and not others, so more is reserved than is ever
allocated at once. How much more follows from the order in which tensors come and go: here a log's
changes go through the same rules.

Source: torch's ``CUDACachingAllocator`` in its default settings: blocks of 512 bytes, the smallest
free part that fits, segments of 2 MiB for up to 1 MiB, of 20 MiB for up to 10 MiB, and of the
tensor's own size, in steps of 2 MiB, above.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

from shardwise.base.observe import Memory
from shardwise.insight.planning.events import Change, Log

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
