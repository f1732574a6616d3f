"""Where a host keeps versions of a training in memory, for longer than its ranks live.

    /dev/shm/shardwise-1000-4026531836-2417-88213-6c1d9a0be24f7a31
             user, namespace of processes, keeper: its process and its start, job

The keeper is the process that starts the ranks again: our launcher, or torchrun's agent. Its folder
goes with it: a launcher deletes it at its end, and what a killed one left is deleted by the next
training that keeps something.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from pathlib import Path

from shardwise.base.errors import CheckpointError
from shardwise.elastic.world import PARENT_PID, job_id, start_of

#: Names a folder in memory to use in place of ``/dev/shm``.
MEMORY = "SHARDWISE_MEMORY"
_NAME = re.compile(r"shardwise-(\d+)-(\d+)-(\d+)-(\d+)-[0-9a-f]{16}", re.ASCII)


def memory_folder() -> Path:
    """Return the folder of this host for the job that this process is a rank of; it is made.

    Raises:
        CheckpointError: nothing starts this process again, there is no memory for files, or the
            folder is another user's.
    """
    job, keeper = job_id(), int(os.environ.get(PARENT_PID, os.getppid()))
    start = start_of(keeper)
    if job is None or start is None:
        raise CheckpointError(
            "found no launcher that starts this process again, so that none could go on from what "
            "is kept in memory; start it with `shardwise run`, `shardwise train` or torchrun, or "
            "pass a folder"
        )
    if not _memory().is_dir():
        raise CheckpointError(
            f"found no folder {_memory()} on this host, expected one in memory; {MEMORY} may name "
            "another"
        )
    _delete_abandoned()
    folder = _memory() / _name(job, keeper, start)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise CheckpointError(f"{folder}: expected a folder of this user alone")
    return folder


def delete_memory(job: str) -> None:
    """Delete the folder that ranks of this process had for a job, if they had one."""
    start = start_of(os.getpid())
    if start is not None:
        shutil.rmtree(_memory() / _name(job, os.getpid(), start), ignore_errors=True)


def _memory() -> Path:
    return Path(os.environ.get(MEMORY) or "/dev/shm")


def _name(job: str, keeper: int, start: int) -> str:
    digest = hashlib.sha256(job.encode()).hexdigest()[:16]
    return f"shardwise-{os.geteuid()}-{_processes()}-{keeper}-{start}-{digest}"


def _delete_abandoned() -> None:
    """Delete folders of this user whose keeper has ended."""
    for folder in _memory().glob(f"shardwise-{os.geteuid()}-{_processes()}-*"):
        found = _NAME.fullmatch(folder.name)
        if found is not None and start_of(int(found[3])) != int(found[4]):
            shutil.rmtree(folder, ignore_errors=True)


def _processes() -> int:
    """Return the number of this process's namespace of processes: in others, ids mean others."""
    return os.stat("/proc/self/ns/pid").st_ino
