"""What a check has found."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

_LONGEST = 2000  # characters of a line, however many hosts have something to say


class Level(enum.Enum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"  # a job runs, slower or at a risk
    FAIL = "fail"  # a job does not run


@dataclass(frozen=True)
class Finding:
    """One verdict.

    Attributes:
        check: which check, as the table in ``docs/multi-node.md`` names it.
        level: how bad it is.
        text: what was found.
        advice: what to do; empty where nothing is to be done.
    """

    check: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        line = f"{self.level.value:<5}{self.check:<12}{self.text}{advice}"
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def listed(items: Iterable[object], count: int, by: str = ", ") -> str:
    """The first few of some items for people, and how many more there are.

    Args:
        items: as many as there are, or the first of them.
        count: how many there are.
        by: what stands between two.
    """
    shown = [str(item) for item, _ in zip(items, range(16), strict=False)]
    more = [f"{count - len(shown)} more"] if count > len(shown) else []
    return by.join([*shown, *more])


def good(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, advice: str) -> Finding:
    """A job would run, but not well."""
    return Finding(check, Level.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """A job would not run."""
    return Finding(check, Level.FAIL, text, advice)
