"""What is known to be wrong: the smallest programs, one of each kind."""

from __future__ import annotations

from tests.fuzz.program import Program

KNOWN: list[Program] = []
