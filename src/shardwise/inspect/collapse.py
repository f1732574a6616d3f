"""Blocks that repeat as one: ``model.layers.0..11`` for twelve layers that are cut alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.inspect.report import ParameterReport

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a name


@dataclass(frozen=True)
class Row:
    """Parameters that are the same but for numbers in their names.

    Attributes:
        prefix: the name up to the last number, ``"model.layers.0..11"``; may be empty.
        name: the rest of it.
        members: the parameters; one, if nothing repeats.
    """

    prefix: str
    name: str
    members: tuple[ParameterReport, ...]

    @property
    def first(self) -> ParameterReport:
        """One that stands for all."""
        return self.members[0]

    @property
    def full_name(self) -> str:
        """Prefix and name."""
        return f"{self.prefix}.{self.name}" if self.prefix else self.name


def collapsed(parameters: Iterable[ParameterReport], *, expand: bool = False) -> list[Row]:
    """Rows in the order of the parameters; with ``expand`` one for each parameter."""
    alike: dict[object, list[ParameterReport]] = {}
    for each in parameters:
        alike.setdefault(each.name if expand else _key(each), []).append(each)
    rows: list[Row] = []
    for members in alike.values():
        numbers = [tuple(map(int, _NUMBER.findall(each.name))) for each in members]
        seen = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if math.prod(map(len, seen)) == len(members):
            rows.append(_row(members, seen))
        else:  # a pattern that ranges cannot tell
            rows += [
                _row([each], [[n] for n in own]) for each, own in zip(members, numbers, strict=True)
            ]
    return rows


def _key(each: ParameterReport) -> object:
    return (
        _NUMBER.sub("#", each.name),
        each.dtype,
        each.trainable,
        each.kind,
        each.placements,
        each.tiling,
        len(each.aliases),
    )


def _row(members: Sequence[ParameterReport], seen: Sequence[Sequence[int]]) -> Row:
    ranges = iter(seen)
    name = _NUMBER.sub(lambda _: _range(next(ranges)), members[0].name)
    last = max(
        (match.end() for match in re.finditer(r"(?<![^.])\d+[\d.,]*(?=\.)", name)), default=0
    )
    return Row(name[:last], name[last:].lstrip("."), tuple(members))


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return str(first)
    if last - first + 1 == len(numbers):
        return f"{first}..{last}"
    return ",".join(map(str, numbers))
