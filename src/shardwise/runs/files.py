"""The names of the files in the folder of a run, and whether a training holds its lock."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

RECORD = "run.json"
OPTIONS = "config.yaml"
METRICS = "metrics.jsonl"
RANKS = "ranks.jsonl"
PLAN = "plan.json"
LAYOUT = "layout.html"
TIMELINE = "timeline"  # a folder
REPORT = "report.html"
SAMPLE = "sample.txt"
CONFUSION = "confusion.png"
CHECKPOINTS = "checkpoints"
LOCK = "run.lock"


def is_locked(file: Path) -> bool:
    """Return whether a training holds the lock of its folder."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(handle)
    return False
