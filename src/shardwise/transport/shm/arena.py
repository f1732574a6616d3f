"""Anonymous memory that the ranks of one host share, and windows through which a process sees it.

The memory is one file without a name, as long as memory could ever be and as large as what is
written to it. Ranks need no agreement: every rank takes the same pieces in the same order, so all
of them find a piece at the same place. The kernel frees the file when the last rank is gone,
however it ended.

A window may be private: then pages that this process writes to become its own, and show the file no
more. :class:`PrivatePages` finds out whether there are any.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Self

import torch

from shardwise.base import observe
from shardwise.base.libc import (
    DONT_NEED,
    MAP_FAILED,
    MAP_FIXED,
    MAP_NORESERVE,
    libc,
)
from shardwise.base.observe import Memory
from shardwise.transport.memory import pack_offsets

#: Length of the file in bytes. It takes no memory until it is written to.
LENGTH = 2**62

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
# Bits of an entry of /proc/self/pagemap; the highest one says that the page is present.
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
# The system call that scans those entries, since Linux 6.7, and its kinds of pages.
_PAGEMAP_SCAN = 0xC0606610
_KIND_OF_FILE, _KIND_PRESENT, _KIND_SWAPPED = 1 << 2, 1 << 3, 1 << 4


class Arena:
    """A range of the file, and how much of it has been taken.

    Args:
        fd: the descriptor of the file.
        first: where the range begins, in bytes.
        last: where it ends.
    """

    def __init__(self, fd: int, first: int, last: int) -> None:
        self.fd = fd
        self._taken = first
        self._last = last

    @staticmethod
    def create() -> int:
        """Create the file and return its descriptor.

        Raises:
            OSError: the system refuses a file of that length.
        """
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, LENGTH)
        except OSError:
            os.close(fd)
            raise
        return fd

    @classmethod
    def ranges(cls, fd: int, count: int) -> list[Self]:
        """Cut the file into ranges of equal length."""
        length = LENGTH // count // _PAGE * _PAGE
        return [cls(fd, i * length, (i + 1) * length) for i in range(count)]

    def window(self, length: int) -> Window:
        """Make a window that is to be opened on this range."""
        return Window(length)

    def report(self, kind: Memory, name: str, nbytes: int) -> None:
        """Report that ``nbytes`` more of the file are in use, on the account of this rank."""
        if nbytes:
            observe.memory(kind, name, nbytes)

    def take(self, nbytes: int) -> int:
        """Take the next piece and return where it begins.

        Raises:
            MemoryError: the range is used up.
        """
        at, self._taken = self._taken, self._taken + whole_pages(nbytes)
        if self._taken > self._last:
            raise MemoryError("the addresses of this rank's shared memory are used up")
        return at


class Window:
    """A range of this process's addresses, through which it sees a piece of an arena.

    The addresses belong to the window for life; the memory behind them comes and goes. Before the
    window is opened there is none: touching it ends the process.

    Args:
        length: in bytes, whole pages.

    Attributes:
        length: as passed.
        address: where the window begins.
        keeps: an object that has to live as long as the window; replaced when the window is opened
            elsewhere.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.keeps: object = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.address = _map(None, length, _PROT_NONE, flags, -1, 0)
        weakref.finalize(self, libc().munmap, self.address, length).atexit = False

    def open(self, fd: int, at: int, flags: int = 0) -> None:
        """Show the file from ``at`` on, with memory behind the pages that are touched only.

        With ``flags=MAP_POPULATE``, there is memory behind every page at once.
        """
        self._open(fd, at, mmap.MAP_SHARED | MAP_FIXED | flags)

    def open_private(self, fd: int, at: int) -> None:
        """Show the file from ``at`` on; no other process sees what is written here.

        A page that is written to shows the file no more, until :meth:`forget_writes`.
        """
        self._open(fd, at, mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE)

    def forget_writes(self) -> None:
        """Show the file again on all pages of a private window that were written to.

        Raises:
            OSError: the system refuses (the memory is locked, say).
        """
        if libc().madvise(self.address, self.length, DONT_NEED) != 0:
            raise _refused("forget what was written to shared memory")

    def forbid(self) -> None:
        """Close the window: touching it ends the process until :meth:`allow`. Unmap nothing.

        Raises:
            OSError: the system refuses.
        """
        self._protect(_PROT_NONE)

    def allow(self) -> None:
        """Open a window that :meth:`forbid` closed, on what it showed before.

        Raises:
            OSError: the system refuses.
        """
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Make a 1-D tensor on the window's addresses, which keeps the window alive."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        seen = (ctypes.c_char * nbytes).from_address(self.address + offset)
        seen.__dict__["window"] = self  # the tensor holds what it was made from
        return torch.frombuffer(seen, dtype=dtype)

    def tensors(self, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Make 1-D tensors that follow each other from the beginning of the window on."""
        offsets, _ = pack_offsets(numels, dtypes)
        return [
            self.tensor(offset, numel, dtype)
            for offset, numel, dtype in zip(offsets, numels, dtypes, strict=True)
        ]

    def _open(self, fd: int, at: int, flags: int) -> None:
        _map(self.address, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, at)

    def _protect(self, protection: int) -> None:
        if libc().mprotect(self.address, self.length, protection) != 0:
            raise _refused("change the protection of shared memory")


class Extents:
    """The pages of a piece that have been touched, and so have memory.

    Attributes:
        nbytes: of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._ranges: list[tuple[int, int]] = []

    def clear(self) -> None:
        """Forget all pages."""
        self.nbytes, self._ranges = 0, []

    def add(self, first: int, last: int) -> int:
        """Add the pages of a range of bytes; return how many bytes are new."""
        if first >= last:
            return 0
        first, last = first // _PAGE * _PAGE, whole_pages(last)
        apart = [each for each in self._ranges if each[1] < first or each[0] > last]
        touching = [each for each in self._ranges if not (each[1] < first or each[0] > last)]
        for start, end in touching:
            first, last = min(first, start), max(last, end)
        self._ranges = [*apart, (first, last)]
        before, self.nbytes = self.nbytes, sum(end - start for start, end in self._ranges)
        return self.nbytes - before


def whole_pages(nbytes: int) -> int:
    """Round ``nbytes`` up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def punch(fd: int, at: int, length: int) -> None:
    """Give whole pages of the file back to the system. No rank may read them afterwards.

    If the system refuses, they stay taken until the last rank is gone: no value depends on it.
    """
    libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, at, length)


class PageMap:
    """The system's information about this process's pages."""

    def __init__(self) -> None:
        self._fd = -1
        try:
            self._fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        weakref.finalize(self, os.close, self._fd).atexit = False

    def scan(self, scan: _Scan) -> bool:
        """Whether a scan finds a page.

        Raises:
            OSError: the system has no such call.
        """
        return bool(fcntl.ioctl(self._fd, _PAGEMAP_SCAN, scan) > 0)

    def entries(self, address: int, length: int) -> bytes:
        """Read the entries of pages, 8 bytes each; fewer if they cannot be read."""
        try:
            return os.pread(self._fd, 8 * length // _PAGE, 8 * address // _PAGE)
        except OSError:
            return b""


class _Scan(ctypes.Structure):
    """The argument of ``PAGEMAP_SCAN``: see Linux's documentation of pagemap."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "found", "found_length", "max_pages"),
            *("inverted", "all_of", "any_of", "returned"),
        )
    )


class PrivatePages:
    """The pages of a private window that became this process's own because it wrote to them.

    Args:
        pagemap: where to look.
        address: where the range of pages begins.
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

    def exist(self) -> bool:
        """Whether there is such a page; true if the system does not say."""
        if self._scan is not None:
            try:
                return self._pagemap.scan(self._scan)
            except OSError:
                self._scan = None  # an older system
        return has_own_entry(self._pagemap.entries(*self._range), self._range[1])


def has_own_entry(entries: bytes, length: int) -> bool:
    """Whether one of the pages of ``length`` bytes is this process's own, by their entries."""
    if len(entries) * _PAGE != 8 * length:
        return True
    numbers = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    taken = (numbers < 0) | ((numbers & _SWAPPED) != 0)
    return bool((taken & ((numbers & _OF_FILE) == 0)).any())


def _map(address: int | None, length: int, protection: int, flags: int, fd: int, at: int) -> int:
    found = libc().mmap(address, length, protection, flags, fd, at)
    if found is None or found == MAP_FAILED:
        raise _refused(f"map {length} bytes of shared memory")
    return int(found)


def _refused(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"the system refuses to {what}: {os.strerror(code)}")
