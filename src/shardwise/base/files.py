"""Files: opened safely, read in full or refused, and written so that they reach the disk.

Checkpoints may come from strangers. A path in one may be a pipe, a device, or a link that leads
elsewhere, so files are opened here and nowhere else. Torch is not imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import threading
import time
import weakref
from enum import Enum
from pathlib import Path
from typing import Self

from shardwise.base.errors import CheckpointError
from shardwise.base.strict import refuse

_SYNC_EVERY = 32 << 20  # bytes
_LOCK_TRIES, _LOCK_SECONDS = 20, 0.01
_MOST_OF_LOCK = 300  # bytes: the name of a host, and a number


class Links(Enum):
    """Whether to follow a symbolic link. The value is a flag of ``os.open``."""

    REFUSE = os.O_NOFOLLOW
    FOLLOW = 0


class Closing:
    """Base class of objects that hold files open. Close them, or use a ``with`` statement."""

    def close(self) -> None:
        """Close all files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_file(path: Path, links: Links = Links.REFUSE) -> tuple[int, int]:
    """Open a regular file to read.

    Returns:
        Its descriptor, and its size in bytes.

    Raises:
        CheckpointError: it is missing, or it is a device, a pipe, or a link that is not followed.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links.value)
    except OSError as error:
        no_link = ", not a link" if links is Links.REFUSE else ""
        raise CheckpointError(
            f"{path}: cannot be opened ({error.strerror}); expected a regular file{no_link}"
        ) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise CheckpointError(
            f"{path}: found {stat.filemode(status.st_mode)}, expected a regular file"
        )
    return handle, status.st_size


def read_exactly(handle: int, into: memoryview, at: int, file: Path) -> None:
    """Fill memory from an open file.

    Args:
        handle: descriptor of the file.
        into: memory to fill, as bytes.
        at: first byte of the file to read.
        file: path of the file, for error messages.

    Raises:
        CheckpointError: the file cannot be read, or ends too early.
    """
    while into.nbytes:
        try:
            got = os.preadv(handle, [into], at)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
        if not got:
            raise CheckpointError(f"{file}: ends at byte {at}, expected {into.nbytes} more")
        at += got
        into = into[got:]


def read_small(path: Path, most: int, links: Links = Links.REFUSE) -> bytes:
    """Read a regular file of at most ``most`` bytes.

    Raises:
        CheckpointError: it is larger, cannot be read, or is not a regular file.
    """
    handle, size = open_file(path, links)
    with os.fdopen(handle, "rb") as file:
        if size > most:
            refuse(str(path), f"{size:,} bytes", f"at most {most:,}")
        try:
            text = file.read(size + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(text) > size:
        refuse(str(path), "more bytes than when it was opened", f"{size:,}")
    return text


def size_of(folder: Path) -> int:
    """The bytes of all files in a folder, whatever other processes do with them meanwhile."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(OSError):
                size += file.stat().st_size if file.is_file() else 0
    return size


class NewFile:
    """A new file that is written front to back, and is on the disk when the ``with`` block ends.

    While it is written, another thread already syncs what has been written, so that little is
    left to wait for at the end.

    Args:
        path: path of the file, which must not exist.

    Attributes:
        size: bytes written so far.

    Raises:
        OSError: the file exists, or cannot be written; the error names it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0
        self._synced = 0
        self._syncing: threading.Thread | None = None
        self._handle = -1

    def __enter__(self) -> Self:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._path, flags, 0o666)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._syncing is not None:
                self._syncing.join()
            if kind is None:
                os.fsync(self._handle)
        except OSError as error:
            raise _named(error, self._path) from None
        finally:
            os.close(self._handle)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: they cannot be written, because the disk is full for instance.
        """
        left = memoryview(data)
        try:
            while left.nbytes:
                count = os.write(self._handle, left)
                self.size += count
                left = left[count:]
        except OSError as error:
            raise _named(error, self._path) from None
        idle = self._syncing is None or not self._syncing.is_alive()
        if idle and self.size - self._synced >= _SYNC_EVERY:
            self._synced = self.size
            self._syncing = threading.Thread(target=self._sync)
            self._syncing.start()

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # the sync at the end reports it
            os.fdatasync(self._handle)


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, and wait until it is on the disk.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with NewFile(path) as file:
        file.write(data)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that is complete, and on the disk, as soon as it is there.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        write_new(partial, content)
        partial.replace(path)
    except OSError as error:
        raise _named(error, path) from error
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the list of the names in a folder, is on the disk.

    Raises:
        OSError: it cannot be synced.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LockHandle(Closing):
    """An open file whose lock ends with this process, whatever processes it has forked.

    The lock is also released once nothing refers to this object.

    Args:
        handle: descriptor of the file, which is closed with this.
    """

    def __init__(self, handle: int) -> None:
        self._release = weakref.finalize(self, os.close, handle)
        _locked.add(self)

    def close(self) -> None:
        """Release the lock."""
        self._release()


class LockedFile(LockHandle):
    """A file that one process at a time can lock, and that says which one has.

    Args:
        path: path of the file; made if it does not exist.
        doing: what only the process with the lock does, for the error message.

    Raises:
        CheckpointError: another process has locked it.
        OSError: it cannot be opened, or the file system has no locks.
    """

    def __init__(self, path: Path, doing: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
        super().__init__(handle)
        try:
            lock_soon(handle)
        except BlockingIOError:
            holder = content_of_lock(handle).decode(errors="replace").strip()
            self.close()
            raise CheckpointError(
                f"{doing}: found {holder or 'a process'} doing that ({path} is locked), expected "
                "one at a time; end it first, or take another name"
            ) from None
        except OSError:
            self.close()
            raise
        name_holder(handle)


_locked: weakref.WeakSet[LockHandle] = weakref.WeakSet()


def _release_in_child() -> None:
    # A child has the same lock, and would keep it after its parent has been killed.
    for each in list(_locked):
        each.close()


os.register_at_fork(after_in_child=_release_in_child)


def is_locked(path: Path) -> bool:
    """Whether a process has locked a file. It need not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def lock_soon(handle: int) -> None:
    """Lock a file, or give up soon: who looks whether it is locked locks it briefly.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the file system has no locks.
    """
    for _ in range(_LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_SECONDS)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def content_of_lock(handle: int) -> bytes:
    """What a file says that a process has locked."""
    # A host that lost its power may leave zeros.
    return os.pread(handle, _MOST_OF_LOCK, 0).strip(b"\0")


def name_holder(handle: int) -> None:
    """Write to a locked file which process holds it."""
    # It only informs: on a full disk the lock holds all the same.
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _named(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file."""
    return OSError(error.errno, error.strerror, str(path))
