"""Calls of Linux's C library that Python lacks, or makes under the interpreter's lock."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

MAP_FIXED, MAP_NORESERVE, MAP_POPULATE = 0x10, 0x4000, 0x8000
#: What ``mmap`` returns where it fails.
MAP_FAILED = ctypes.c_void_p(-1).value
# Advice to ``madvise``.
WILL_NEED, DONT_NEED, HUGE_PAGE, POPULATE_READ = 3, 4, 14, 22


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
    found.sync_file_range.argtypes = [number, offset, offset, ctypes.c_uint]
    return found
