"""What a launcher writes to its user, who may have gone."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write a line to standard error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def restore_cursor() -> None:
    """A rank that is killed cannot show the cursor again that its progress bar hid."""
    with contextlib.suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")
            sys.stdout.flush()
