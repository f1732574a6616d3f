"""Versions of weights in memory that processes of one host share.

    $TMPDIR/shardwise-1000/policy.lock        locked by the process that publishes
    $TMPDIR/shardwise-1000/policy.pointer     where the newest version is: a process, a descriptor

A version is a safetensors file without a name. The publishing process holds a few of them, and
writes a new version over one that is not the newest and that nobody reads. Readers open it through
the publisher's descriptor in ``/proc``, which the kernel allows to the same user only, and map it.
The kernel frees the memory with the last process that has it, however that one ended.

A reader locks what it reads (``flock``, shared), and then looks whether the pointer still names it.
The publisher locks what it writes (exclusive), and moves the pointer at the end. So a reader never
sees a part of a version. The map holds the lock, so that it lasts as long as the tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.base import plain
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.disk.files import LockedFile, read_small
from shardwise.checkpoint.disk.safetensors import StoredSpan, read_header
from shardwise.weights.version import FORMAT, Version, check_format, quoted

_MOST_POINTER = 4096  # bytes


@dataclass(frozen=True)
class _Pointer:
    """Where the newest version is.

    Attributes:
        format: of the pointer and of what it points to.
        host: of the publisher; see :func:`this_host`.
        process: the publisher.
        descriptor: of the file, in that process.
        inode: of the file.
        version: its number.
    """

    format: int
    host: str
    process: int
    descriptor: int
    inode: int
    version: int

    @property
    def shown(self) -> Version:
        """The version, for readers."""
        return Version(self.version, f"process {self.process}, file {self.inode}")


def path_of(process: int, descriptor: int) -> Path:
    """The path at which processes of the same user on this host find a descriptor's file."""
    return Path(f"/proc/{process}/fd/{descriptor}")


def this_host() -> str:
    """What is equal for processes that see each other in ``/proc``: the boot and the namespace.

    Raises:
        CheckpointError: the system is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError as error:
        raise CheckpointError(
            f"weights in memory: found no {error.filename}, expected Linux; publish to a folder "
            "(to=)"
        ) from None


def _home() -> Path:
    """The folder of this user's pointers and locks; made if it does not exist.

    Raises:
        CheckpointError: it is not this user's alone.
    """
    home = Path(tempfile.gettempdir()) / f"shardwise-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(
            f"{home}: found {stat.filemode(found.st_mode)} of user {found.st_uid}, expected a "
            f"folder that only user {os.getuid()} may use; remove it, or set TMPDIR"
        )
    return home


def _file_of(name: str, suffix: str) -> Path:
    """The path of a pointer or a lock."""
    return _home() / f"{quoted(name)}.{suffix}"


def _pointer_in(file: Path) -> _Pointer | None:
    """Read a pointer; ``None`` if there is none.

    Raises:
        CheckpointError: it is of another release.
    """
    if not file.exists():
        return None
    try:
        pointer = plain.read(_Pointer, read_small(file, _MOST_POINTER))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}; it is of another release of Shardwise") from None
    check_format(file, pointer.format)
    return pointer


class SharedVersions:
    """The versions that this process publishes under one name.

    Args:
        name: the name.
        most: how many versions there is memory for, at least 2.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes this name.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._host = this_host()
        self._pointer = _file_of(name, "pointer")
        self._lock = LockedFile(_file_of(name, "lock"), f"publishing {name!r}")
        self._files: list[int] = []  # descriptors, those written longest ago first
        # Also where it is forgotten, and at the end of the process; not in one that was forked.
        self._close = weakref.finalize(
            self, _close, self._files, self._lock, self._pointer, os.getpid()
        )
        self.version = 0
        with contextlib.suppress(CheckpointError):  # of another release
            if (last := _pointer_in(self._pointer)) is not None:
                self.version = last.version
        self._newest = -1

    @contextlib.contextmanager
    def next(self, header: bytes, nbytes: int) -> Iterator[Path]:
        """Yield a file to write the next version to; it is shown when the block ends without error.

        Args:
            header: what precedes the elements.
            nbytes: size of the file.

        Raises:
            CheckpointError: readers hold all memory there is; the message names them.
            OSError: there is not enough memory.
        """
        descriptor = self._locked_file()
        try:
            if os.fstat(descriptor).st_size != nbytes:
                os.ftruncate(descriptor, nbytes)
                os.posix_fallocate(descriptor, 0, nbytes)  # else a write could end the process
            os.pwrite(descriptor, header, 0)
            yield path_of(os.getpid(), descriptor)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        inode, version = os.fstat(descriptor).st_ino, self.version + 1
        shown = _Pointer(FORMAT, self._host, os.getpid(), descriptor, inode, version)
        # It says nothing any more after a crash of the system, so it need not be on the disk.
        beside = self._pointer.with_suffix(".next")
        beside.write_bytes(plain.written(shown))
        beside.replace(self._pointer)
        self.version, self._newest = version, descriptor
        self._files.remove(descriptor)
        self._files.append(descriptor)

    def close(self) -> None:
        """Publish no more. Readers keep what they have."""
        self._close()

    def _locked_file(self) -> int:
        """A file that is not the newest version and that nobody reads, locked."""
        for descriptor in self._files:
            if descriptor != self._newest:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return descriptor
        if len(self._files) < self._most:
            descriptor = os.memfd_create(f"weights {quoted(self._name)}", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._files.append(descriptor)
            return descriptor
        readers = _lockers({os.fstat(each).st_ino for each in self._files})
        raise CheckpointError(
            f"publishing {self._name!r}: found readers of every version but the newest "
            f"({', '.join(readers) or 'unknown'}), expected memory for one that nobody reads; let "
            f"them drop their tensors, or publish with more than buffers={self._most}"
        )


def _close(files: list[int], lock: LockedFile, pointer: Path, process: int) -> None:
    if os.getpid() == process:
        pointer.unlink(missing_ok=True)
    while files:
        os.close(files.pop())
    lock.close()


def _lockers(inodes: set[int]) -> list[str]:
    """The processes that hold shared locks of files, as text."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, access, process, file, *_ = line.replace("-> ", "").split()
            if (kind, access) == ("FLOCK", "READ") and int(file.rpartition(":")[2]) in inodes:
                found.add(int(process))
    return [f"process {process}{_command(process)}" for process in sorted(found)]


def _command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return f" ({b' '.join(words).decode(errors='replace').strip()[:80]})"


class MappedVersions:
    """The versions of one name, read in memory.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pointer = _file_of(name, "pointer")

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none.

        Raises:
            CheckpointError: it is published by another release, or in another container.
        """
        pointer = self._live()
        return None if pointer is None else pointer.shown

    def read(self) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]] | None:
        """The newest version, and its tensors by name; ``None`` if there is none.

        The tensors share memory with the publisher, which does not write to it as long as one of
        them exists. What their reader writes to them stays in its process.

        Raises:
            CheckpointError: it is published by another release, or in another container.
        """
        while (pointer := self._live()) is not None:
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # written, or ended
                if (found := self._mapped(pointer)) is not None:
                    return pointer.shown, found
        return None

    def _live(self) -> _Pointer | None:
        """The pointer, if its publisher still holds the file."""
        pointer = _pointer_in(self._pointer)
        if pointer is None:
            return None
        if pointer.host != this_host():
            raise CheckpointError(
                f"{self._name!r}: is published on another host or in another container; expected "
                "processes that see each other in /proc. Publish to a folder that both see (to=)"
            )
        with contextlib.suppress(FileNotFoundError):
            if path_of(pointer.process, pointer.descriptor).stat().st_ino == pointer.inode:
                return pointer
        return None

    def _mapped(self, pointer: _Pointer) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Map a version; ``None`` if it has been replaced meanwhile.

        Raises:
            BlockingIOError: it is being written over.
            FileNotFoundError: its publisher has ended.
        """
        descriptor = os.open(
            path_of(pointer.process, pointer.descriptor), os.O_RDONLY | os.O_CLOEXEC
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _pointer_in(self._pointer) != pointer:
                return None
            if os.fstat(descriptor).st_ino != pointer.inode:
                return None
            spans = read_header(path_of(os.getpid(), descriptor))
            # The map duplicates the descriptor, and with it holds the lock.
            memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE)
        finally:
            os.close(descriptor)
        return ((name, _tensor(memory, span)) for name, span in spans.items())


def _tensor(memory: mmap.mmap, span: StoredSpan) -> torch.Tensor:
    """A tensor that shares memory with a map, and keeps it."""
    dtype, shape = torch_dtype(span.info.dtype), span.info.shape
    count = span.info.nbytes // dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=span.start).view(shape)
