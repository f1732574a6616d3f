"""Let ``shardwise train`` compute as slowly as asked.

    PYTHONPATH=benchmarks/stretched GOODPUT_STEP=0.5 shardwise train lm --nproc 4

Python imports a module of this name when a process starts, before anything else. Forward and
backward of a step then last as long as asked, as though a device computed them: the rest of that
time is slept. So processes that share too few processors do not slow each other, and where one is
gone, the others do not become faster. The exchanges and the optimizer step take what they take.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any


def stretch(loop: Any, seconds: float) -> None:
    """Let forward and backward of a training loop last at least so long."""
    compute = loop._accumulate

    @functools.wraps(compute)
    def stretched(*args: Any) -> Any:
        until = time.monotonic() + seconds
        found = compute(*args)
        time.sleep(max(0.0, until - time.monotonic()))
        return found

    loop._accumulate = stretched


if "GOODPUT_STEP" in os.environ and "shardwise.app.recipes.rank" in sys.orig_argv:
    from shardwise.app.recipes.core.loop import Loop

    stretch(Loop, float(os.environ["GOODPUT_STEP"]))
