"""Anonymous memory that the ranks of one host have in common, and where in it things lie.

One file without a name, as long as memory could ever be and as large as what is written to it.
Nothing is agreed on between ranks: every rank takes the same pieces in the same order, so all of
them find a piece at the same place. The kernel frees it when the last rank has gone, however it
went.

Which pages of a private mapping are this process's own, because it has written to them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from typing import Any

import torch

#: Length of the file. It takes no memory until it is written to.
LENGTH = 2**62
_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MADV_DONTNEED = 4
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    return libc


def _map(address: int | None, length: int, protection: int, flags: int, fd: int, at: int) -> int:
    found = _libc().mmap(address, length, protection, flags, fd, at)
    if found is None or found == _FAILED:
        raise _refused(f"map {length} bytes of shared memory")
    return int(found)


def whole_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


class Window:
    """A range of this process's addresses, through which a piece of the arena is seen.

    Its addresses stay its own for life; what is behind them comes and goes. Before it is opened
    there is no memory behind it: touching it ends the process.

    Args:
        length: in bytes, whole pages.
        keeps: what lives as long as the window.

    Attributes:
        keeps: the same; may be replaced when the window is opened elsewhere.
    """

    def __init__(self, length: int, keeps: object = None) -> None:
        self.length = length
        self.keeps = keeps
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = _map(None, length, _PROT_NONE, flags, -1, 0)
        weakref.finalize(self, _libc().munmap, self.address, length).atexit = False

    def open(self, fd: int, at: int) -> None:
        """Let the window show the file from ``at`` on."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        _map(self.address, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, at)

    def open_sparse(self, fd: int, at: int) -> None:
        """As :meth:`open`, but take memory only for what is touched."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _map(self.address, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, at)

    def open_private(self, fd: int, at: int) -> None:
        """Let it show the file from ``at`` on; what is written here, no other process sees.

        A page that was written to shows the file no more, until :meth:`forget_writes`.
        """
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _map(self.address, self.length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, at)

    def forget_writes(self) -> None:
        """Have a private window show the file again, where it was written to.

        Raises:
            OSError: the system does not do it (memory that is locked, say).
        """
        if _libc().madvise(self.address, self.length, _MADV_DONTNEED) != 0:
            raise _refused("forget what was written to shared memory")

    def forbid(self) -> None:
        """Close the window: touching it ends the process until :meth:`allow`. Nothing is unmapped.

        Raises:
            OSError: the system does not do it.
        """
        self._protect(_PROT_NONE)

    def allow(self) -> None:
        """Open a window again that :meth:`forbid` closed, on what it showed before."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, protection: int) -> None:
        if _libc().mprotect(self.address, self.length, protection) != 0:
            raise _refused("change the protection of shared memory")

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor on the window's addresses, which keeps the window alive."""
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        seen = (ctypes.c_char * nbytes).from_address(self.address + offset)
        seen.__dict__["window"] = self  # the tensor holds what it was made from
        return torch.frombuffer(seen, dtype=dtype)


def punch(fd: int, at: int, length: int) -> None:
    """Give whole pages of the file back to the system. Nobody may read them afterwards.

    Where the system refuses, they stay taken until the last rank has gone: no value depends on it.
    """
    _libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, at, length)


def _refused(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"the system refuses to {what}: {os.strerror(code)}")


class Arena:
    """A range of the file, and what of it has been taken.

    Args:
        fd: of the file.
        first: where the range begins.
        last: where it ends.
    """

    def __init__(self, fd: int, first: int, last: int) -> None:
        self.fd = fd
        self._taken = first
        self._last = last

    @staticmethod
    def create() -> int:
        """Make the file; return its descriptor.

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

    def take(self, nbytes: int) -> int:
        """Take the next piece; return where it begins."""
        at, self._taken = self._taken, self._taken + whole_pages(nbytes)
        if self._taken > self._last:
            raise MemoryError("the addresses of this rank's shared memory are used up")
        return at


def ranges(fd: int, count: int) -> list[Arena]:
    """Cut the file into ranges of equal length."""
    length = LENGTH // count // _PAGE * _PAGE
    return [Arena(fd, i * length, (i + 1) * length) for i in range(count)]


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
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
            return os.pread(self._fd, 8 * length // _PAGE_BYTES, 8 * address // _PAGE_BYTES)
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
    if len(entries) * _PAGE_BYTES != 8 * length:
        return True
    numbers = torch.frombuffer(bytearray(entries), dtype=torch.int64)
    taken = (numbers < 0) | ((numbers & _SWAPPED) != 0)
    return bool((taken & ((numbers & _OF_FILE) == 0)).any())
