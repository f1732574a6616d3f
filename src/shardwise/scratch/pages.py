"""Pages of a file that is mapped: read before they are used, and let go afterwards.

Python's ``mmap`` objects have some of these calls, but hold the interpreter's lock while the disk
works.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any

_WILL_NEED, _DONT_NEED, _POPULATE_READ = 3, 4, 22  # advice to madvise
_WAIT_BEFORE, _WRITE = 1, 2  # flags of sync_file_range
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def read_ahead(address: int, nbytes: int) -> None:
    """Start to read pages. What cannot be read is noticed by :func:`read`."""
    if _libc() is not None:
        _libc().madvise(*_whole(address, nbytes), _WILL_NEED)


def read(address: int, nbytes: int) -> None:
    """Bring pages into memory, and wait for them.

    Without this, they come as they are touched, and a disk that fails ends the process by a signal.
    That is how it is before Linux 5.14.

    Raises:
        OSError: they cannot be read.
    """
    if _libc() is None or _libc().madvise(*_whole(address, nbytes), _POPULATE_READ) == 0:
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
    if _libc() is not None:
        _libc().madvise(*_whole(address, nbytes), _DONT_NEED)


def write_behind(file: int, offset: int, nbytes: int) -> None:
    """Start to write pages to the disk."""
    if _libc() is not None:
        _libc().sync_file_range(file, offset, nbytes, _WRITE)


def check_writes(file: int, end: int) -> None:
    """Check that no page could not be written since the last check.

    Args:
        file: the file.
        end: its size. There are no pages behind, so nothing is waited for.

    Raises:
        OSError: one could not. Its values are lost once it has left the page cache.
    """
    if _libc() is not None and _libc().sync_file_range(file, end, mmap.PAGESIZE, _WAIT_BEFORE):
        code = ctypes.get_errno()
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # others: there is no such call
            raise OSError(code, os.strerror(code))


def make_private(file: int, offset: int, address: int, nbytes: int) -> None:
    """Map a part of a file again at the same address, so that writes stay in this process.

    Raises:
        OSError: the system refuses. This process can only read it then.
    """
    if _libc() is None:
        return
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if _libc().mmap(address, nbytes, protection, flags, file, offset) == _FAILED:
        code = ctypes.get_errno()
        _libc().mprotect(address, nbytes, mmap.PROT_READ)
        raise OSError(code, os.strerror(code))


def _whole(address: int, nbytes: int) -> tuple[int, int]:
    """Return the address and the length of the pages of a range. It begins with a page."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return begin, address + nbytes - begin


@functools.cache
def _libc() -> Any:
    """Return the C library; ``None`` if it is not that of Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "sync_file_range"):
        return None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    ]
    return libc
