"""The lock on a run's folder: two runs never train into one.

The launcher of host 0 holds it, or rank 0 where no launcher of ours is above; so a job that begins
again is not in its own way. The lock is the kernel's (``flock``) and ends with the process that
holds it, however that ends. The file stays, and says who held it last; a file that says anything
else is not ours, and not written to. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator

from shardwise.launch.console import say
from shardwise.recipes.config import OptionError
from shardwise.recipes.rundir import RunDir

_MOST_BYTES = 300  # of a holder: the name of a host, and a number
_HOLDER = re.compile(rb"process \d+ on [^\n]*\n?")


@contextlib.contextmanager
def locked(files: RunDir) -> Iterator[None]:
    """Be the only run that trains into a folder. Makes the folder.

    Where the file system has no locks, a line says so.

    Raises:
        OptionError: another run holds the lock, the folder cannot be written to, or the file is
            not one that a run made.
    """
    files.make()
    handle = _open(files)
    try:
        _lock(handle, files)
        yield
    finally:
        os.close(handle)


def _open(files: RunDir) -> int:
    # O_NOFOLLOW, O_NONBLOCK: who holds the lock is written into it, so never through a link; and a
    # pipe would wait for its other end. O_CLOEXEC: not inherited by ranks: they end with their
    # launcher, and a lock that outlived it would be in the way of the next start.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(files.lock, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_ours(files, "a symbolic link") from None
        reason = f"{files.lock}, which cannot be opened ({error.strerror})"
        raise OptionError("--out", reason, "a folder that can be written to") from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _not_ours(files, f"no regular file ({stat.filemode(mode)})")
    return handle


def _not_ours(files: RunDir, what: str) -> OptionError:
    return OptionError(
        "--out",
        f"{files.lock}, {what}",
        "the file that a run makes to lock its folder: remove this, or take another folder",
    )


def _lock(handle: int, files: RunDir) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _content(handle).decode(errors="replace").strip()
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
    found = _content(handle)
    if found and not _HOLDER.fullmatch(found):
        raise _not_ours(files, "a file of something else")
    # It only informs: on a full disk the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _content(handle: int) -> bytes:
    # A host that lost its power may leave zeros.
    return os.pread(handle, _MOST_BYTES, 0).strip(b"\0")
