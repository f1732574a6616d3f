"""What a check has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
        return f"{self.level.value:<5}{self.check:<12}{self.text}{advice}"


def good(check: str, text: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, advice: str) -> Finding:
    """A job would run, but not well."""
    return Finding(check, Level.WARN, text, advice)


def fail(check: str, text: str, advice: str) -> Finding:
    """A job would not run."""
    return Finding(check, Level.FAIL, text, advice)
