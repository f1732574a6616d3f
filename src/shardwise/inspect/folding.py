"""Fold repeated names into one row: ``model.layers.0..11`` for twelve equal layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Generic, TypeVar

from rich.table import Table
from rich.text import Text

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
    for prefix, group in groupby(rows, key=lambda row: row.prefix):
        members = list(group)
        if prefix:
            times = len(members[0].members)
            table.add_row(Text(f"{prefix}  ({times} alike)" if times > 1 else prefix))
        for row in members:
            name = f"  {row.name}" if prefix else row.name
            table.add_row(Text(name), *map(Text, cells(row)))


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
