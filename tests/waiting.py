"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    """Look until it has happened, at most for what anything may take on a busy machine."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "this never happened"
        time.sleep(0.005)
