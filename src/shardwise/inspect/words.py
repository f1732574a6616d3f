"""Ranks, shapes and spans in few words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.inspect.tiling import Block, Span


_MOST_RANGES = 4


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: ``0-3, 8``; many evenly spaced ones as ``0, 8 .. 56``."""
    ranges = list(_ranges(ranks))
    if len(ranges) <= _MOST_RANGES:
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    starts = [first for first, _ in ranges]
    lengths = {last - first for first, last in ranges}
    steps = {b - a for a, b in pairwise(starts)}
    if len(lengths) == len(steps) == 1:
        (first, end), (second, _), (start, last) = ranges[0], ranges[1], ranges[-1]
        if first == end:
            return f"{first}, {second} .. {last}"
        return f"{first}-{end}, {second}-{second + end - first} .. {start}-{last}"
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MOST_RANGES])
    return f"{shown}, ... ({len(ranks)} ranks)"


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each run of consecutive numbers."""
    first = last = None
    for number in numbers:
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None and last is not None:
            yield first, last
        first = last = number
    if first is not None and last is not None:
        yield first, last


def holders_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 8``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_in_words(ranks)}"


def shape_in_words(shape: Sequence[int]) -> str:
    """``1024x256``, or ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def spans_in_words(spans: Sequence[Span], size: int) -> str:
    """First and last index of each span, such as ``0..63``; ``all`` of ``size``; ``none``."""
    if not spans:
        return "none"
    if list(spans) == [(0, size)]:
        return "all"
    shown = [str(a) if n == 1 else f"{a}..{a + n - 1}" for a, n in spans[:3]]
    return ", ".join(shown) + (", ..." if len(spans) > 3 else "")


def block_in_words(block: Block, shape: Sequence[int]) -> str:
    """The position of a block: ``rows 0..63, all columns``."""
    if not shape:
        return "the scalar"
    if not block.numel:
        return "nothing"
    return ", ".join(_along(dim, block.part[dim], size) for dim, size in enumerate(shape))


def _along(dim: int, spans: Sequence[Span], size: int) -> str:
    words = spans_in_words(spans, size)
    name = dimension_name(dim)
    return f"all {name}" if words == "all" else f"{name} {words}"


def dimension_name(dim: int) -> str:
    """``rows``, ``columns``, ``dim 2``, ..."""
    return ("rows", "columns")[dim] if dim < 2 else f"dim {dim}"


def counted(things: Sized | int, noun: str) -> str:
    """``1 parameter``, ``2 parameters``."""
    count = things if isinstance(things, int) else len(things)
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
