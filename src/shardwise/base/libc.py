"""Calls of Linux that Python lacks, or makes under the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
from typing import Any

MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000
#: What ``mmap`` returns where it fails.
MAP_FAILED = ctypes.c_void_p(-1).value
# Advice to ``madvise``.
WILL_NEED, DONT_NEED, HUGE_PAGE, POPULATE_READ = 3, 4, 14, 22

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 2**31 - 1
# The number of the system call on x86-64. On other processors, writes may become visible in another
# order than the program's, which the code that builds on this does not allow for.
_FUTEX = 202


@functools.cache
def libc() -> Any:
    """Return the C library; ``None`` if it is not that of Linux."""
    found = ctypes.CDLL(None, use_errno=True)
    if not hasattr(found, "sync_file_range"):
        return None
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    found.mmap.restype = address
    found.mmap.argtypes = [address, size, number, number, number, offset]
    found.munmap.argtypes = [address, size]
    found.madvise.argtypes = [address, size, number]
    found.mprotect.argtypes = [address, size, number]
    found.fallocate.argtypes = [number, number, offset, offset]
    found.syscall.restype = ctypes.c_long
    found.syscall.argtypes = [
        *(ctypes.c_long, address, number, ctypes.c_uint32),
        *(address, address, number),
    ]
    found.sync_file_range.argtypes = [number, offset, offset, ctypes.c_uint]
    return found


def trim_heap() -> None:
    """Give memory that was freed back to the system. Else the C library keeps what it can reuse."""
    if hasattr(libc(), "malloc_trim"):
        libc().malloc_trim(0)


def core() -> int:
    """Return the number of the core that this thread runs on; -1 if it is not known."""
    library = libc()
    return -1 if library is None else int(library.sched_getcpu())


# -- sleeping on a number in memory that processes share ------------------------------------------


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """Whether this machine can sleep on shared memory, and shows writes in the program's order."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 2**32


def wait_on(address: int, value: int, seconds: float) -> None:
    """Sleep until the 32-bit number at ``address`` is woken, or at most ``seconds``.

    Returns at once if the number is no longer ``value``. May return early, so check again.

    Raises:
        OSError: the system refuses.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    if libc().syscall(_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0) < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


def wake(address: int) -> None:
    """Wake all who sleep on the 32-bit number at ``address``."""
    libc().syscall(_FUTEX, address, _FUTEX_WAKE, _EVERYONE, None, None, 0)


# -- pages of a file that is mapped ---------------------------------------------------------------

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
