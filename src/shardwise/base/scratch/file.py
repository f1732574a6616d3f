"""A file that vanishes with its process, read and written past the page cache, or as memory.

The file has no name, so the kernel frees it when the process ends, however it ends. Reads and
writes are direct where the file system can (``O_DIRECT``): a page cache of states that are used
once a step would only push out what is used more often. Threads issue them, in blocks, so that
several are under way at a time.

As memory, it is mapped in few large extents, since a process has a limit of maps (65,530)
and descriptors, and each map of Python holds one. An extent takes no room on the disk. What is
allocated in it does, at once, so that a full disk is noticed there, not by a signal to code that
touches the memory.

Libraries for direct I/O exist (DeepNVMe, KvikIO, TensorNVMe). They are built for CUDA, or on libaio
with a compiler at hand; ``preadv`` and ``pwritev`` of four threads reach what the disk can do.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.base import libc
from shardwise.base.errors import OffloadError
from shardwise.base.units import binary_size

#: Tensors with fewer bytes on a rank stay in memory: counts of steps, biases, norms, their states.
SMALLEST = 64 * 1024
#: Offsets and sizes of direct I/O are multiples of this, on all common disks.
ALIGNMENT = 4096
_BLOCK = 4 * 1024 * 1024  # bytes of one read or write
_THREADS = 4
_EXTENT = 256 * 1024 * 1024  # bytes of an extent at least, of address space and not of memory
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


#: Where a part of a file is to be in memory, and the tensor that it is as memory of the file.
KeptPart = tuple[int, torch.Tensor]


class _Descriptor:
    """A descriptor that is open as long as the file, or a map of it, is used.

    Args:
        number: the descriptor.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, os.close, number)


class _MappedPart(mmap.mmap):
    """A part of the file that is mapped, which its memory keeps when the file has gone.

    Attributes:
        handle: of the file.
        offset: where it begins in the file.
        address: where it begins in memory.
        nbytes: how long it is.
    """

    handle: _Descriptor
    offset: int
    address: int
    nbytes: int


class ScratchFile:
    """A file without a name.

    Args:
        folder: a folder on the disk; made if it does not exist.

    Raises:
        OffloadError: no file can be made there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = _Descriptor(_open_nameless(folder))
        except OSError as error:
            raise OffloadError(
                f"offload: found no way to make a file in {folder} ({error.strerror}), expected a "
                "folder on a local disk that this process may write to"
            ) from error
        self._file = self._handle.number
        self._nbytes = 0
        self._end = 0  # of what was ever allocated
        self._extents: list[_MappedPart] = []  # in the order of their offsets
        self._free: list[tuple[int, int]] = []  # offsets and sizes, in order
        self._returned: list[tuple[int, int]] = []  # by finalizers, which cannot wait for a lock
        self._failed: OffloadError | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwise-offload")
        # Not __del__: threads still hold what they are writing.
        self._close = weakref.finalize(self, _close, self._threads, self._process)

    @property
    def nbytes(self) -> int:
        """How many bytes of the disk are set aside."""
        return self._nbytes

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory that is a part of the file: pages come and go as they are used.

        It is free again when no tensor holds it any more.

        Args:
            nbytes: how much; any number.

        Returns:
            Bytes, of shape ``(nbytes,)``, of any value.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        size = aligned(nbytes)
        offset = self._set_aside(size)
        extent = self._extents[
            bisect.bisect(self._extents, offset, key=lambda each: each.offset) - 1
        ]
        begin = offset - extent.offset
        view = memoryview(extent)[begin : begin + nbytes]
        memory = torch.frombuffer(view, dtype=torch.uint8)
        place = memory.data_ptr(), size, offset
        weakref.finalize(view, _give_back, self._returned, *place)
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory that is a part of this file."""
        return self._extent_of(tensor) is not None

    def read_ahead(self, tensor: torch.Tensor) -> None:
        """Start to read a tensor into memory, if it is in this file."""
        if self._extent_of(tensor) is not None:
            libc.read_ahead(tensor.data_ptr(), tensor.nbytes)

    def load(self, tensor: torch.Tensor) -> None:
        """Bring a tensor into memory, if it is in this file.

        Raises:
            OffloadError: it cannot be read, or something could not be written since the last call.
        """
        if self._extent_of(tensor) is None or os.getpid() != self._process:
            return
        try:
            libc.read(tensor.data_ptr(), tensor.nbytes)
        except OSError as error:
            raise self._error(f"reading {binary_size(tensor.nbytes)}", error) from error
        self._check_writes()

    def let_go(self, tensor: torch.Tensor) -> None:
        """Take a tensor out of this process's memory, if it is in this file.

        It stays what it is, and can be used as before. What was written to it goes to the disk
        meanwhile, and the kernel takes its memory when it needs that for something else.
        """
        extent = self._extent_of(tensor)
        if extent is None or os.getpid() != self._process:
            return  # what a fork has written is nowhere else
        address = tensor.data_ptr()
        libc.let_go(address, tensor.nbytes)
        libc.write_behind(self._file, extent.offset + address - extent.address, tensor.nbytes)

    def read(self, memory: torch.Tensor, parts: Sequence[KeptPart]) -> list[Future[None]]:
        """Start to read parts of the file into ``memory``, of bytes on the host."""
        return self._start(os.preadv, "reading", memory, parts)

    def write(self, memory: torch.Tensor, parts: Sequence[KeptPart]) -> list[Future[None]]:
        """Start to write parts of the file from ``memory``, of bytes on the host."""
        return self._start(os.pwritev, "writing", memory, parts)

    def _set_aside(self, nbytes: int) -> int:
        """Return the offset of bytes that the disk has set aside.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        self._check_process("setting aside")  # before the lock, which a fork finds as it was
        with self._lock:
            found = self._use_again(nbytes)
            if found is not None:
                return found
            try:
                offset = self._room(nbytes)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file, offset, nbytes)
            except OSError as error:
                self._give_up_room()
                raise self._error(f"setting aside {binary_size(nbytes)}", error) from error
            self._end = offset + nbytes
            self._nbytes += nbytes
            return offset

    def _use_again(self, nbytes: int) -> int | None:
        """Return the offset of bytes that are free again, in the smallest place that fits."""
        while self._returned:
            self._join(*self._returned.pop())
        fitting = [(size, offset) for offset, size in self._free if size >= nbytes]
        if not fitting:
            return None
        size, offset = min(fitting)
        at = bisect.bisect_left(self._free, (offset, size))
        self._free[at : at + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
        return offset

    def _join(self, offset: int, nbytes: int) -> None:
        """Note that bytes are free, as one place with those beside them in the same extent."""
        at = bisect.bisect(self._free, (offset, nbytes))
        begins = {each.offset for each in self._extents}
        first, last, end = at, at, offset + nbytes
        if at and sum(self._free[at - 1]) == offset and offset not in begins:
            first, offset = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end and end not in begins:
            last, end = at + 1, sum(self._free[at])
        self._free[first:last] = [(offset, end - offset)]

    def _start(
        self,
        move: Callable[[int, list[memoryview], int], int],
        doing: str,
        memory: torch.Tensor,
        parts: Sequence[KeptPart],
    ) -> list[Future[None]]:
        self._check_process(doing)
        view = memoryview(cast(Any, memory.numpy()))
        return [
            self._threads.submit(
                self._move,
                move,
                doing,
                view[at + begin : at + min(begin + _BLOCK, nbytes)],
                offset + begin,
            )
            for at, offset, nbytes in self._runs(parts)
            for begin in range(0, nbytes, _BLOCK)
        ]

    def _runs(self, parts: Sequence[KeptPart]) -> list[tuple[int, int, int]]:
        """What lies together both in memory and in the file: where there, and how many bytes."""
        runs: list[tuple[int, int, int]] = []
        for at, tensor in parts:
            extent, nbytes = self._extent_of(tensor), tensor.nbytes
            assert extent is not None
            offset = extent.offset + tensor.data_ptr() - extent.address
            if runs:
                begin, start, length = runs[-1]
                if (begin + length, start + length) == (at, offset):
                    at, offset, nbytes = begin, start, length + nbytes
                    del runs[-1]
            runs.append((at, offset, nbytes))
        return runs

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        doing: str,
        part: memoryview,
        offset: int,
    ) -> None:
        done = 0
        while done < len(part):
            try:
                moved = move(self._file, [part[done:]], offset + done)
            except OSError as error:
                raise self._error(f"{doing} {binary_size(len(part))}", error) from error
            if moved == 0:
                raise OffloadError(
                    f"offload: {self._folder}: {doing} {binary_size(len(part))} at byte {offset} "
                    f"ended after {done} bytes; the disk fails"
                )
            done += moved

    def _room(self, nbytes: int) -> int:
        """Return the offset of bytes that are not used yet, in an extent.

        Raises:
            OSError: the file cannot be that long, or cannot be mapped.
        """
        last = self._extents[-1] if self._extents else None
        if last is not None:
            # The end may lie before it, if the disk was full when it was made.
            begin = max(self._end, last.offset)
            if begin + nbytes <= last.offset + last.nbytes:
                return begin
        offset = 0 if last is None else last.offset + last.nbytes
        unit = mmap.ALLOCATIONGRANULARITY
        least = max(-(-nbytes // unit), 1) * unit
        # Extents grow with the file, so there are few. Limits may allow no more than is needed.
        for size in (max(least, _EXTENT, offset // 4 // unit * unit), least):
            try:
                os.ftruncate(self._file, offset + size)
                made = _MappedPart(self._file, size, offset=offset)
            except OSError:
                if size == least:
                    raise
            else:
                break
        made.handle, made.offset, made.nbytes = self._handle, offset, size
        made.address = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        _mapped.add(made)
        self._extents.append(made)
        return offset

    def _give_up_room(self) -> None:
        """Give back what a disk has set aside before it was full. Some file systems keep that."""
        if self._extents:
            last = self._extents[-1]
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.ftruncate(self._file, last.offset + last.nbytes)

    def _extent_of(self, tensor: torch.Tensor) -> _MappedPart | None:
        """The extent that a tensor of the host lies in."""
        if not tensor.nbytes:
            return None
        address = tensor.data_ptr()
        for extent in self._extents:
            if extent.address <= address < extent.address + extent.nbytes:
                return extent
        return None

    def _check_process(self, doing: str) -> None:
        if os.getpid() != self._process:
            raise OffloadError(
                f"offload: {doing} in {self._folder} in process {os.getpid()}, which was forked "
                f"from {self._process} and has nothing there; make a model or an optimizer in this "
                "process"
            )

    def _check_writes(self) -> None:
        """Check that everything could be written.

        Raises:
            OffloadError: something could not, and is lost.
        """
        with self._lock:
            if self._failed is None and self._extents:
                last = self._extents[-1]
                try:
                    libc.check_writes(self._file, last.offset + last.nbytes)
                except OSError as error:
                    self._failed = self._error("writing", error)
        if self._failed is not None:
            raise OffloadError(str(self._failed)) from self._failed

    def _error(self, doing: str, error: OSError) -> OffloadError:
        free = ""
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                free = f", where {binary_size(shutil.disk_usage(self._folder).free)} are free"
        return OffloadError(
            f"offload: {doing} after {binary_size(self._nbytes)} in {self._folder}{free}: "
            f"{error.strerror}"
        )


def aligned(nbytes: int) -> int:
    """Round up to what direct I/O takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def file_in(folder: Path) -> ScratchFile:
    """Return the file of this process in a folder that all who ask for one share.

    Raises:
        OffloadError: no file can be made there.
    """
    key = os.getpid(), folder.absolute()
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = ScratchFile(folder)
    return found


_shared: weakref.WeakValueDictionary[tuple[int, Path], ScratchFile] = weakref.WeakValueDictionary()
#: What this process has mapped, which may outlive its file.
_mapped: weakref.WeakSet[_MappedPart] = weakref.WeakSet()


def _give_back(returned: list[tuple[int, int]], address: int, nbytes: int, offset: int) -> None:
    """Take memory that no tensor holds any more out of this process, and let others have it."""
    libc.let_go(address, nbytes)
    returned.append((offset, nbytes))


def _isolate() -> None:
    """In a fork: keep what this process writes to itself."""
    failed: OSError | None = None
    for each in _mapped:
        try:
            libc.make_private(each.handle.number, each.offset, each.address, each.nbytes)
        except OSError as error:  # a limit, as of RLIMIT_DATA
            failed = error
    _mapped.clear()  # in a fork of this one, it would undo what this one has written
    if failed is not None:
        raise OffloadError(
            f"offload: process {os.getpid()} was forked, and can only read what its parent has on "
            f"a disk: {failed.strerror}. A write to a parameter ends it by SIGSEGV"
        ) from failed


os.register_at_fork(after_in_child=_isolate)


def _open_nameless(folder: Path) -> int:
    """Open a file without a name, for direct I/O if that works.

    Raises:
        OSError: no file can be made in the folder.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        number = os.dup(file.fileno())
    with contextlib.suppress(OSError):
        fcntl.fcntl(number, fcntl.F_SETFL, getattr(os, "O_DIRECT", 0))
    return number


def _close(threads: ThreadPoolExecutor, process: int) -> None:
    if os.getpid() == process:  # a fork has no threads, and may have got their locks
        threads.shutdown(wait=True)
