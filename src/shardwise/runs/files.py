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

from shardwise.base.files import content_of_lock
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


class _RunFile(_RunPath):
    """A file of one run: ``--overwrite`` deletes it."""


class _RunFolder(_RunPath):
    """A folder of one run: ``--overwrite`` deletes it with all that is in it."""


@dataclass(frozen=True)
class RunFiles:
    """The folder of a run and what lies in it.

    Attributes:
        root: the folder.
    """

    root: Path
    options = _RunFile("config.yaml")  # of the last session, as --config reads them
    #: Of those before: session-2.yaml is of the second session, and of earlier ones without a file.
    earlier_options = _RunFolder("earlier-options")
    model_config = _RunFile("config.json")  # the model's, as transformers reads it
    generation_config = _RunFile("generation_config.json")  # of a run that began with --from
    tokenizer = _RunFolder(TOKENIZER)  # as transformers saves it
    metrics = _RunFile("metrics.jsonl")  # a line a step
    ranks = _RunFile("ranks.jsonl")  # how long each rank computed, every few seconds
    layout = _RunFile("layout.html")  # who holds what, as the inspector's page
    report = _RunFile("report.html")  # the page of the run
    plan = _RunFile("plan.json")  # what was predicted, with --plan
    timeline = _RunFolder("timeline")  # what every rank did in a step, with --timeline
    sample = _RunFile("sample.txt")  # what a language model writes at the end
    weights = _RunFile("model.safetensors")  # a classifier at the end, as one file
    confusion = _RunFile("confusion.png")  # what it mistakes
    loss_chart = _RunFile("loss.png")  # which earlier versions drew
    adapters = _RunFolder("adapters")  # at the end, in the format of peft
    merged = _RunFolder("merged")  # weights at the end, with the adapters merged into them
    checkpoints = _RunFolder("checkpoints")  # step-00000100/, ...
    quorum = _RunFile("quorum.jsonl")  # what happened among replicas, with --diloco-deadline
    replicas = _RunFolder("replicas")  # 1/, ...: the runs of all of them but the first, the same
    tensorboard = _RunFolder("tensorboard")  # with --log tensorboard
    wandb = _RunFolder("wandb")  # with --log wandb
    lock = _RunPath("run.lock")  # locked while the run trains; says by which process
    #: Configuration, versions, outcome: a folder with it is a run. It is deleted last: a deletion
    #: that is cut short leaves what still is a run.
    run_json = _RunFile("run.json")

    @property
    def own_files(self) -> list[Path]:
        """The files that ``--overwrite`` deletes."""
        return self._of(_RunFile)

    @property
    def own_folders(self) -> list[Path]:
        """The folders that it deletes."""
        return self._of(_RunFolder)

    def _of(self, kind: type[_RunPath]) -> list[Path]:
        return [self.root / p.name for p in vars(RunFiles).values() if isinstance(p, kind)]


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
        holder = content_of_lock(handle).decode(errors="replace").strip()
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
