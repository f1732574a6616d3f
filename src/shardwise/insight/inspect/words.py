"""Ranks, shapes and names in few words: ``0-3, 8``, ``rows 0..63``, ``model.layers.0..11``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

from shardwise.base.units import printable

if TYPE_CHECKING:
    from rich.table import Table

    from shardwise.insight.inspect.grid import Block
    from shardwise.sharding.part import Span

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
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


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


_Item = TypeVar("_Item")

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a name


@dataclass(frozen=True)
class Row(Generic[_Item]):
    """Items that are equal except for numbers in their names.

    Attributes:
        prefix: the name up to the last number, ``"model.layers.0..11"``; may be empty.
        name: the rest of it.
        members: the items; one if nothing repeats.
    """

    prefix: str
    name: str
    members: tuple[_Item, ...]

    @property
    def first(self) -> _Item:
        """The item that stands for all of them."""
        return self.members[0]

    @property
    def full_name(self) -> str:
        """Prefix and name."""
        return f"{self.prefix}.{self.name}" if self.prefix else self.name


def fold(
    items: Iterable[_Item], name: Callable[[_Item], str], kind: Callable[[_Item], Hashable]
) -> list[Row[_Item]]:
    """Fold items whose names differ by numbers only, in the order of their first members.

    Args:
        items: what to fold.
        name: the dotted name of an item.
        kind: what has to be equal for two items to be folded.
    """
    alike: dict[Hashable, list[_Item]] = {}
    for each in items:
        alike.setdefault((_NUMBER.sub("#", name(each)), kind(each)), []).append(each)
    rows: list[Row[_Item]] = []
    for members in alike.values():
        names = [name(each) for each in members]
        numbers = [tuple(map(int, _NUMBER.findall(each))) for each in names]
        seen = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if math.prod(map(len, seen)) == len(members):
            rows.append(_row(names[0], members, seen))
        else:  # ranges would name members that do not exist
            rows += [
                _row(own, [each], [[number] for number in found])
                for own, each, found in zip(names, members, numbers, strict=True)
            ]
    return rows


def add_rows(
    table: Table, rows: Iterable[Row[_Item]], cells: Callable[[Row[_Item]], Sequence[str]]
) -> None:
    """Add folded rows to a table, those of repeated layers indented below a line with the prefix.

    Args:
        table: the table; its first column has the names.
        rows: the rows.
        cells: makes the text of the other columns.
    """
    from rich.text import Text  # the library itself does without rich

    def text(content: str) -> Text:
        return Text(printable(content))

    for prefix, group in groupby(rows, key=lambda row: row.prefix):
        members = list(group)
        if prefix:
            times = len(members[0].members)
            table.add_row(text(f"{prefix}  ({times} alike)" if times > 1 else prefix))
        for row in members:
            name = f"  {row.name}" if prefix else row.name
            table.add_row(text(name), *map(text, cells(row)))


def _row(name: str, members: Sequence[_Item], seen: Sequence[Sequence[int]]) -> Row[_Item]:
    ranges = iter(seen)
    name = _NUMBER.sub(lambda _: _range(next(ranges)), name)
    last = max(
        (match.end() for match in re.finditer(r"(?<![^.])\d+[\d.,]*(?=\.)", name)), default=0
    )
    return Row(name[:last], name[last:].lstrip("."), tuple(members))


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 2 and len(steps) == 1:
        return f"{first}..{last}" if steps == {1} else f"{first},{numbers[1]}..{last}"
    if len(numbers) == 2 and last == first + 1:
        return f"{first}..{last}"
    return ",".join(map(str, numbers))
