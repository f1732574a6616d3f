"""What is known to be wrong: the programs in ``known.txt``."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.program import Program, parse

_FILE = Path(__file__).with_suffix(".txt")

KNOWN: list[Program] = [
    parse(line) for line in _FILE.read_text().splitlines() if line and not line.startswith("#")
]
