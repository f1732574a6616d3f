"""The lock on a run's folder: two runs never train into one.

The launcher of host 0 holds it, or rank 0 where no launcher of ours is above; so a job that begins
again is not in its own way. The lock is the kernel's (``flock``) and ends with the process that
holds it, however that ends. The file stays, and says who held it last. No torch here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator

from shardwise.launch.console import say
from shardwise.recipes.config import OptionError
from shardwise.recipes.rundir import RunDir

_MOST_BYTES = 300  # of a holder: the name of a host, and a number


@contextlib.contextmanager
def locked(files: RunDir) -> Iterator[None]:
    """Be the only run that trains into a folder. Makes the folder.

    Where the file system has no locks, a line says so.

    Raises:
        OptionError: another run holds the lock, or the folder cannot be written to.
    """
    files.make()
    try:
        # Not inherited by ranks: they end with their launcher, and a lock that outlived it would
        # be in the way of the next start.
        handle = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        reason = f"{files.lock}, which cannot be opened ({error.strerror})"
        raise OptionError("--out", reason, "a folder that can be written to") from None
    try:
        _lock(handle, files)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, files: RunDir) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, _MOST_BYTES, 0).decode(errors="replace").strip()
        raise OptionError(
            "--out",
            f"a run that is under way in {files.root} ({holder or 'it has only begun'})",
            "another folder, or to wait until that run has ended",
        ) from None
    except OSError as error:
        say(
            f"warning    {files.lock} cannot be locked ({error.strerror}): start no other run there"
        )
        return
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
