"""Calls of Linux that Python lacks, or makes under the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
import functools
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
# The number of the system call. On other processors, writes may become visible in another order
# than the program's, which the code that builds on this does not allow for.
_FUTEX = {"x86_64": 202}


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
    found.sync_file_range.argtypes = [number, offset, offset, ctypes.c_uint]
    return found


# -- sleeping on a number in memory that processes share ------------------------------------------


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def has_futex() -> bool:
    """Whether this machine can sleep on shared memory, and shows writes in the program's order."""
    return sys.platform == "linux" and platform.machine() in _FUTEX and sys.maxsize > 2**32


def wait_on(address: int, value: int, seconds: float) -> None:
    """Sleep until the 32-bit number at ``address`` is woken, or at most ``seconds``.

    Returns at once if the number is no longer ``value``. May return early, so check again.

    Raises:
        OSError: the system refuses.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    result = libc().syscall(
        ctypes.c_long(_FUTEX[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(value),
        ctypes.byref(limit),
        None,
        ctypes.c_int(0),
    )
    if result < 0:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(code, os.strerror(code))


def wake(address: int) -> None:
    """Wake all who sleep on the 32-bit number at ``address``."""
    libc().syscall(
        ctypes.c_long(_FUTEX[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(_EVERYONE),
        None,
        None,
        ctypes.c_int(0),
    )
