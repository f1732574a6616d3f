"""The lines that a command writes for its user."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write a line to standard error, unless its reader is gone."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
