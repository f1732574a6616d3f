"""Making a program smaller that shows something."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.program import Program

#: Says of several programs which of them show it too.
Shows = Callable[[list[Program]], list[bool]]


def shrink(program: Program, shows: Shows, *, rounds: int = 60, batch: int = 12) -> Program:
    """Take away from a program, and simplify it, as long as it shows what it shows.

    Args:
        program: that shows it.
        shows: runs programs.
        rounds: of at most ``batch`` programs each.
    """
    tried = {program}
    while rounds > 0:
        candidates = [each for each in simpler(program) if each not in tried]
        if not candidates:
            return program
        for start in range(0, len(candidates), batch):
            some = candidates[start : start + batch]
            tried.update(some)
            rounds -= 1
            found = [each for each, does in zip(some, shows(some), strict=True) if does]
            if found:
                program = min(found, key=size)
                break
            if rounds <= 0:
                return program
        else:
            return program
    return program


def size(program: Program) -> int:
    """How much there is to read in a program."""
    return len(repr(program))


def simpler(value: Any) -> Iterator[Any]:
    """Values like ``value`` with something taken away, the simplest first."""
    if isinstance(value, tuple):
        yield from _shorter(value)
        for at, each in enumerate(value):
            for smaller in simpler(each):
                yield (*value[:at], smaller, *value[at + 1 :])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        # Steps before blocks: they are what a run costs.
        for field in sorted(fields, key=lambda field: field.name != "steps"):
            now = getattr(value, field.name)
            if isinstance(now, tuple) or dataclasses.is_dataclass(now):
                for smaller in simpler(now):
                    yield dataclasses.replace(value, **{field.name: smaller})
            elif now != field.default and field.name != "world":
                yield dataclasses.replace(value, **{field.name: field.default})


def _shorter(value: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    half = len(value) // 2
    if half > 1:
        yield value[half:]
        yield value[:half]
    for at in range(len(value)):
        yield (*value[:at], *value[at + 1 :])
