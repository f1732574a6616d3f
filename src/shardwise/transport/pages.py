"""Which pages of a private mapping are this process's own, because it has written to them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Bits of an entry of /proc/self/pagemap; the highest one says that the page is there.
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
# The system call that looks through those entries, since Linux 6.7, and kinds of pages to it.
_PAGEMAP_SCAN = 0xC0606610
_KIND_OF_FILE, _KIND_PRESENT, _KIND_SWAPPED = 1 << 2, 1 << 3, 1 << 4


class PageMap:
    """What the system tells of this process's pages."""

    def __init__(self) -> None:
        self._fd = -1
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    def look_at(self, address: int, length: int) -> Look:
        """Prepare to look at whole pages of a private mapping, again and again."""
        return Look(self, address, length)

    def scan(self, scan: _Scan) -> bool:
        """Whether a page is found.

        Raises:
            OSError: the system has no such call.
        """
        return bool(fcntl.ioctl(self._fd, _PAGEMAP_SCAN, scan) > 0)

    def entries(self, address: int, length: int) -> bytes:
        """The entries of pages, 8 bytes each; fewer where they cannot be read."""
        try:
            return os.pread(self._fd, 8 * length // _PAGE, 8 * address // _PAGE)
        except OSError:
            return b""


class _Scan(ctypes.Structure):
    """What to look for: see ``PAGEMAP_SCAN`` in Linux's documentation of pagemap."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "found", "found_length", "max_pages"),
            *("inverted", "all_of", "any_of", "returned"),
        )
    )


class Look:
    """Looks whether a range of private pages has one of this process's own.

    Args:
        pagemap: to look in.
        address: where the range begins, at a page.
        length: in bytes, whole pages.
    """

    def __init__(self, pagemap: PageMap, address: int, length: int) -> None:
        self._pagemap = pagemap
        self._range = address, length
        self._found = (ctypes.c_uint64 * 3)()
        self._scan: _Scan | None = _Scan(
            size=ctypes.sizeof(_Scan),
            start=address,
            end=address + length,
            found=ctypes.addressof(self._found),
            found_length=1,
            max_pages=1,
            inverted=_KIND_OF_FILE,
            all_of=_KIND_OF_FILE,
            any_of=_KIND_PRESENT | _KIND_SWAPPED,
            returned=_KIND_OF_FILE,
        )

    def finds_own_page(self) -> bool:
        """Whether there is one; true where the system does not tell."""
        if self._scan is not None:
            try:
                return self._pagemap.scan(self._scan)
            except OSError:
                self._scan = None  # an older system
        return has_own_entry(self._pagemap.entries(*self._range), self._range[1])


def has_own_entry(entries: bytes, length: int) -> bool:
    """Whether a page of ``length`` bytes of them is this process's own, by their entries."""
    if len(entries) * _PAGE != 8 * length:
        return True
    numbers = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    taken = (numbers < 0) | ((numbers & _SWAPPED) != 0)
    return bool((taken & ((numbers & _OF_FILE) == 0)).any())
