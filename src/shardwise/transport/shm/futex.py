"""Sleep on a number in shared memory, and wake those who sleep on it (Linux)."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import sys
from collections.abc import Callable

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 2**31 - 1
# The system call's number. On other processors, writes may become visible in another order than the
# program's, which the code that builds on this does not allow for.
_NUMBERS = {"x86_64": 202}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Whether this machine can sleep on shared memory, and shows writes in the program's order."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS and sys.maxsize > 2**32


@functools.cache
def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep until the 32-bit number at ``address`` is woken, or at most ``seconds``.

    Returns at once if the number is no longer ``value``. May return early, so check again.

    Raises:
        OSError: the system refuses.
    """
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    result = _syscall()(
        ctypes.c_long(_NUMBERS[platform.machine()]),
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
    _syscall()(
        ctypes.c_long(_NUMBERS[platform.machine()]),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(_EVERYONE),
        None,
        None,
        ctypes.c_int(0),
    )
