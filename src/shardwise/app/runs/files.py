"""The names of the files in the folder of a run, and whether a training holds its lock."""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.disk.companions import TOKENIZER


class _RunPath:
    """A file or a folder in the folder of a run, by its name.

    Args:
        name: relative to that folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFiles, kind: type[RunFiles]) -> Path:
        return run.root / self.name


@dataclass(frozen=True)
class RunFiles:
    """The folder of a run and the paths in it.

    Attributes:
        root: the folder.
    """

    root: Path

    #: Configuration, versions, outcome. A folder with this file is a run.
    run_json = _RunPath("run.json")
    #: The options of the last session, as ``--config`` reads them.
    options = _RunPath("config.yaml")
    #: The model's configuration, as transformers reads it.
    model_config = _RunPath("config.json")
    #: How the model generates, as transformers reads it.
    generation_config = _RunPath("generation_config.json")
    #: Folder of the tokenizer, as transformers saves it.
    tokenizer = _RunPath(TOKENIZER)
    #: One line per step.
    metrics = _RunPath("metrics.jsonl")
    #: How long each rank computed and waited, a line every few seconds.
    ranks = _RunPath("ranks.jsonl")
    #: Who holds what, as the inspector's page.
    layout = _RunPath("layout.html")
    #: The page of the run.
    report = _RunPath("report.html")
    #: What was predicted of the run.
    plan = _RunPath("plan.json")
    #: Folder of the timeline.
    timeline = _RunPath("timeline")
    #: The text that the model writes at the end.
    sample = _RunPath("sample.txt")
    #: The full model at the end, in one file.
    weights = _RunPath("model.safetensors")
    #: The confusion matrix.
    confusion = _RunPath("confusion.png")
    #: Folder of checkpoints.
    checkpoints = _RunPath("checkpoints")
    #: Folder of the adapters at the end, in the format of peft.
    adapters = _RunPath("adapters")
    #: Folder of the weights at the end, with the adapters merged into them.
    merged = _RunPath("merged")
    #: What happened among replicas that are worlds of their own, a line each.
    quorum = _RunPath("quorum.jsonl")
    #: Folder of the runs of all such replicas but the first.
    replicas = _RunPath("replicas")
    #: The file that a run keeps locked while it trains.
    lock = _RunPath("run.lock")
    #: Folder of event files.
    tensorboard = _RunPath("tensorboard")
    #: Folder that Weights & Biases writes to.
    wandb = _RunPath("wandb")


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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to an ``OSError``: a write knows only its descriptor."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
