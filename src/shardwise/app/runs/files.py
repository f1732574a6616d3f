"""The names of the files in the folder of a run, and whether a training holds its lock."""

from __future__ import annotations

import enum
import fcntl
import os
import socket
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
QUORUM = "quorum.jsonl"
REPLICAS = "replicas"  # a folder

_MOST_BYTES = 1024  # of a lock


class Lock(enum.Enum):
    """Whether a training holds the lock of its folder."""

    HELD = "held"
    FREE = "free"  # and it was held on this host, so that no training goes on
    UNKNOWN = "unknown"  # no lock, or one of a host whose locks may not be seen from here


def lock_of(file: Path) -> Lock:
    """Return whether a training holds the lock of its folder.

    Args:
        file: the lock. It says which process has held it, on which host.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return Lock.UNKNOWN
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder = os.pread(handle, _MOST_BYTES, 0).decode(errors="replace").strip()
    except BlockingIOError:
        return Lock.HELD
    except OSError:  # no locks on this file system, or not a file
        return Lock.UNKNOWN
    finally:
        os.close(handle)
    _, on, host = holder.partition(" on ")
    return Lock.FREE if on and host == socket.gethostname() else Lock.UNKNOWN


def is_locked(file: Path) -> bool:
    """Return whether a training is seen to hold the lock of its folder."""
    return lock_of(file) is Lock.HELD
