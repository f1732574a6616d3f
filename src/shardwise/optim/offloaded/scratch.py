"""A file that vanishes with its process, read and written past the page cache.

The file has no name, so the kernel frees it when the process ends, however it ends. Reads and
writes are direct where the file system can (``O_DIRECT``): a page cache of states that are used
once a step would only push out what is used more often. Threads issue them, in blocks, so that
several are under way at a time.

Libraries for direct I/O exist (DeepNVMe, KvikIO, TensorNVMe). They are built for CUDA, or on libaio
with a compiler at hand; ``preadv`` and ``pwritev`` of four threads reach what the disk can do.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from shardwise.errors import OffloadError
from shardwise.units import binary_size

#: Offsets and sizes of direct I/O are multiples of this, on all common disks.
ALIGNMENT = 4096
_BLOCK = 4 * 1024 * 1024  # bytes of one read or write
_THREADS = 4
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Run:
    """Bytes that lie together in memory and in the file.

    Attributes:
        at: where they begin in memory.
        offset: where they begin in the file.
        nbytes: how many there are.
    """

    at: int
    offset: int
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
            self._file = _open_nameless(folder)
        except OSError as error:
            raise OffloadError(
                f"offload: found no way to make a file in {folder} ({error.strerror}), expected a "
                "folder on a local disk that this process may write to"
            ) from error
        self._end = 0
        self._free: dict[int, list[int]] = {}  # offsets by size
        self._maps: dict[int, weakref.ref[mmap.mmap]] = {}  # by offset
        self._process = os.getpid()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shardwise-offload")
        # Not __del__: threads still hold what they are writing.
        self._close = weakref.finalize(self, _close, self._file, self._threads, self._process)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._end

    def allocate(self, nbytes: int) -> int:
        """Return the offset of ``nbytes`` bytes that the disk has set aside.

        Args:
            nbytes: a multiple of ``ALIGNMENT``.

        Raises:
            OffloadError: the disk is full, or fails.
        """
        if self._free.get(nbytes):
            return self._free[nbytes].pop()
        offset = self._end
        try:
            # So that a full disk is noticed here, and not by a write, or by a signal to whoever
            # touches mapped memory.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, offset, nbytes)
            else:
                os.ftruncate(self._file, offset + nbytes)
        except OSError as error:
            raise self._error(f"setting aside {binary_size(nbytes)}", error) from error
        self._end += nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """Give back what :meth:`allocate` returned.

        It is used again once nobody holds a tensor of :meth:`map` there: that keeps its values, as
        in a state dict of before a load.
        """
        found = self._maps.pop(offset, lambda: None)()
        if found is None:
            self._free.setdefault(nbytes, []).append(offset)
        else:
            weakref.finalize(found, self._free.setdefault(nbytes, []).append, offset)

    def map(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a part of the file as memory: pages come and go as they are used.

        Returns:
            Bytes, of shape ``(nbytes,)``.

        Raises:
            OffloadError: they cannot be mapped.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            found = mmap.mmap(self._file, nbytes, offset=offset)
        except OSError as error:  # as where a process may have no more maps
            raise self._error(f"mapping {binary_size(nbytes)}", error) from error
        self._maps[offset] = weakref.ref(found)
        return torch.frombuffer(found, dtype=torch.uint8)

    def read(self, memory: torch.Tensor, runs: Sequence[Run]) -> list[Future[None]]:
        """Start to read into ``memory``, of bytes on the host."""
        return self._start(os.preadv, "reading", memory, runs)

    def write(self, memory: torch.Tensor, runs: Sequence[Run]) -> list[Future[None]]:
        """Start to write from ``memory``, of bytes on the host."""
        return self._start(os.pwritev, "writing", memory, runs)

    def _start(
        self,
        move: Callable[[int, list[memoryview], int], int],
        doing: str,
        memory: torch.Tensor,
        runs: Sequence[Run],
    ) -> list[Future[None]]:
        if os.getpid() != self._process:
            raise OffloadError(
                f"offload: {doing} in {self._folder} in process {os.getpid()}, which was forked "
                f"from {self._process}: the states are those of {self._process}; make an optimizer "
                "in this process"
            )
        view = memoryview(cast(Any, memory.numpy()))
        return [
            self._threads.submit(
                self._move,
                move,
                doing,
                view[run.at + begin : run.at + min(begin + _BLOCK, run.nbytes)],
                run.offset + begin,
            )
            for run in runs
            for begin in range(0, run.nbytes, _BLOCK)
        ]

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

    def _error(self, doing: str, error: OSError) -> OffloadError:
        free = ""
        if error.errno in _FULL:
            with contextlib.suppress(OSError):
                found = os.statvfs(self._folder)
                free = f", where {binary_size(found.f_bavail * found.f_frsize)} are free"
        return OffloadError(
            f"offload: {doing} after {binary_size(self._end)} in {self._folder}{free}: "
            f"{error.strerror}"
        )


def _open_nameless(folder: Path) -> int:
    """Open a file without a name, for direct I/O if that works.

    Raises:
        OSError: no file can be made in the folder.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if hasattr(os, "O_TMPFILE"):
        for flags in (direct, 0):
            with contextlib.suppress(OSError):
                return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    # A file system without such files: a crash in the next line leaves an empty file behind.
    file, name = tempfile.mkstemp(prefix=".shardwise-offload-", dir=folder)
    os.unlink(name)
    return file


def _close(file: int, threads: ThreadPoolExecutor, process: int) -> None:
    if os.getpid() == process:  # a fork has no threads, and may have got their locks
        threads.shutdown(wait=True)
    os.close(file)
