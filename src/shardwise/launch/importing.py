"""Import much in a short time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a process that begins: what is alive afterwards is taken to stay.

    Python looks for garbage while torch and transformers make a million objects, and among them
    again each time it looks later, and when the process ends. There is none: without looking, a
    rank that starts and ends takes 2.4 seconds of a processor instead of 4.
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if looks:
            gc.enable()
