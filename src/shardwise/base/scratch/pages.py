"""Pages of a file that is mapped: read before they are used, and let go afterwards.

Python's ``mmap`` objects have some of these calls, but hold the interpreter's lock while the disk
works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from shardwise.base.scratch.libc import (
    DONT_NEED,
    MAP_FAILED,
    MAP_FIXED,
    MAP_NORESERVE,
    POPULATE_READ,
    WILL_NEED,
    libc,
)

_WAIT_BEFORE, _WRITE = 1, 2  # flags of sync_file_range


def read_ahead(address: int, nbytes: int) -> None:
    """Start to read pages. What cannot be read is noticed by :func:`read`."""
    if libc() is not None:
        libc().madvise(*_whole(address, nbytes), WILL_NEED)


def read(address: int, nbytes: int) -> None:
    """Bring pages into memory, and wait for them.

    Without this, they come as they are touched, and a disk that fails ends the process by a signal.
    That is how it is before Linux 5.14.

    Raises:
        OSError: they cannot be read.
    """
    if libc() is None or libc().madvise(*_whole(address, nbytes), POPULATE_READ) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        read_ahead(address, nbytes)
        return
    if code == errno.EFAULT:  # the kernel's word for the signal that touching them would raise
        code = errno.EIO
    raise OSError(code, os.strerror(code))


def let_go(address: int, nbytes: int) -> None:
    """Take pages out of this process.

    They keep their values, and stay in the page cache for as long as the kernel has room.
    """
    if libc() is not None:
        libc().madvise(*_whole(address, nbytes), DONT_NEED)


def write_behind(file: int, offset: int, nbytes: int) -> None:
    """Start to write pages to the disk."""
    if libc() is not None:
        libc().sync_file_range(file, offset, nbytes, _WRITE)


def check_writes(file: int, end: int) -> None:
    """Check that no page could not be written since the last check.

    Args:
        file: the file.
        end: its size. There are no pages behind, so nothing is waited for.

    Raises:
        OSError: one could not. Its values are lost once it has left the page cache.
    """
    if libc() is not None and libc().sync_file_range(file, end, mmap.PAGESIZE, _WAIT_BEFORE):
        code = ctypes.get_errno()
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # others: there is no such call
            raise OSError(code, os.strerror(code))


def make_private(file: int, offset: int, address: int, nbytes: int) -> None:
    """Map a part of a file again at the same address, so that writes stay in this process.

    Raises:
        OSError: the system refuses. This process can only read it then.
    """
    if libc() is None:
        return
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
    if libc().mmap(address, nbytes, protection, flags, file, offset) == MAP_FAILED:
        code = ctypes.get_errno()
        libc().mprotect(address, nbytes, mmap.PROT_READ)
        raise OSError(code, os.strerror(code))


def _whole(address: int, nbytes: int) -> tuple[int, int]:
    """Return the address and the length of the pages of a range. It begins with a page."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, address + nbytes - begin
