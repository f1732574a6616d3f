"""Versions of weights in memory that processes of one host share.

    $TMPDIR/shardwise-1000/policy.lock        locked by the process that publishes
    $TMPDIR/shardwise-1000/policy.pointer     where the newest version is: a process, a descriptor

A version is a safetensors file without a name. The first rank that publishes holds a few of them,
and has all ranks write a new version over one that is not the newest and that nobody reads. Readers
open it through that rank's descriptor in ``/proc``, which the kernel allows to the same user only,
and map it. The kernel frees the memory with the last process that has it, however that one ended.

A reader locks what it reads (``flock``, shared), and then looks whether the pointer still names it.
The publisher locks what it writes (exclusive), and moves the pointer at the end. So a reader never
sees a part of a version. The map holds the lock, so that it lasts as long as the tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.base import plain
from shardwise.base.boxes import narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import LockedFile, is_locked, read_small
from shardwise.checkpoint.disk.entries import torch_dtype
from shardwise.checkpoint.disk.safetensors import PT_METADATA, StoredSpan, lay_out, read_header
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.checkpoint.ranks.contents import (
    Contents,
    Rows,
    agreed_contents,
    own_rows,
    write_rows,
)
from shardwise.checkpoint.ranks.hf import SavedModel
from shardwise.transport.carrier import host_by
from shardwise.weights.version import LOOK_SECONDS, Version, quoted

_MOST_POINTER = 4096  # bytes


@dataclass(frozen=True)
class _Pointer:
    """Where the newest version is.

    Attributes:
        version: the version.
        host: what is equal for processes that see each other in ``/proc``.
        process: the publisher.
        descriptor: of the file, in that process.
        inode: of the file.
    """

    version: Version
    host: str
    process: int
    descriptor: int
    inode: int

    @property
    def file(self) -> Path:
        """The path at which processes of the same user on this host find the file."""
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")


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


class _Name:
    """The files of one name.

    Args:
        name: the name.

    Attributes:
        memory: what the kernel calls a file in memory of this name.
        lock: the file that the publisher locks.
        pointer: the file that says where the newest version is.
    """

    def __init__(self, name: str) -> None:
        self.memory = f"weights {quoted(name)}"
        self.lock = _home() / f"{quoted(name)}.lock"
        self.pointer = self.lock.with_suffix(".pointer")

    def read(self) -> _Pointer | None:
        """Where the newest version is; ``None`` if there is none.

        Raises:
            CheckpointError: it is of another release.
        """
        if not self.pointer.exists():
            return None
        try:
            return plain.read(_Pointer, read_small(self.pointer, _MOST_POINTER))
        except ValueError as error:
            raise CheckpointError(
                f"{self.pointer}: {error}; is it of another release of Shardwise?"
            ) from None


class MemoryVersions:
    """The versions that the ranks of one host publish to memory. Every rank makes one.

    Args:
        name: what readers call it.
        saved: how the model is saved.
        most: how many versions there is memory for, at least 2.
        ranks: who publishes.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes this name, or the system is not Linux.
    """

    def __init__(self, name: str, saved: SavedModel, most: int, ranks: Ranks) -> None:
        self._doing = f"publishing {name!r}"
        self._saved = saved
        self._most = most
        self._ranks = ranks
        self._maps: dict[Path, torch.Tensor] = {}
        # Of the first rank: descriptors, the newest version last, and before it the one before.
        self._files: list[int] = []
        self._close = weakref.finalize(self, _close, self._files)
        self._lock: LockedFile | None = None
        self._origin = secrets.token_hex(8)
        self._host, self.version = ranks.first(self._doing, lambda: self._begin(name))

    def _begin(self, name: str) -> tuple[str, int]:
        if not hasattr(os, "memfd_create"):
            raise CheckpointError("found a system other than Linux; publish to a folder (to=)")
        self._name = _Name(name)
        self._lock = LockedFile(self._name.lock, self._doing)
        with contextlib.suppress(CheckpointError):  # of another release
            if (last := self._name.read()) is not None:
                return host_by("pid"), last.version.number
        return host_by("pid"), 0

    def update(self) -> None:
        """Write the next version, and show it to readers once all ranks have written.

        Raises:
            CheckpointError: a rank failed, or readers hold all memory there is.
        """
        with contextlib.ExitStack() as locks:

            def prepare(contents: Contents) -> tuple[_Pointer, int]:
                header, _ = lay_out(contents.infos, PT_METADATA)
                nbytes = len(header) + sum(info.nbytes for info in contents.infos.values())
                self._settle()
                descriptor = self._locked_file()
                locks.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
                _resize(descriptor, nbytes)
                os.pwrite(descriptor, header, 0)
                version = Version(self.version + 1, self._origin)
                inode = os.fstat(descriptor).st_ino
                return _Pointer(version, self._host, os.getpid(), descriptor, inode), nbytes

            contents, (pointer, nbytes) = agreed_contents(
                self._contents, self._ranks, self._doing, prepare
            )
            infos = contents.infos
            _, starts = lay_out(infos, PT_METADATA)

            def write(rows: list[Rows]) -> None:
                for each in rows:
                    info = infos[each.name]
                    memory = self._mapped(pointer.file, nbytes)
                    place = memory[starts[each.name] :][: info.nbytes]
                    full = place.view(torch_dtype(info.dtype)).view(info.shape)
                    narrow(full, each.box).copy_(each.values)

            def show() -> None:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._name.lock)  # what cleans TMPDIR goes by the time
                _home()  # it may have been removed all the same
                # It says nothing any more after a crash of the system: no need to sync it.
                beside = self._name.pointer.with_suffix(".next")
                beside.write_bytes(plain.written(pointer))
                # All have written. A reader looks at the pointer once it has locked the file, and
                # whatever happens behind the next line must not leave it locked.
                fcntl.flock(pointer.descriptor, fcntl.LOCK_UN)
                beside.replace(self._name.pointer)
                self._settle()

            written = write_rows(contents, self._ranks, write)
            self._ranks.first(self._doing, show, after=written)
            self.version = pointer.version.number

    def close(self) -> None:
        """Publish no more. Readers keep what they have."""
        self._maps.clear()
        self._close()
        if self._lock is not None:
            self._lock.close()

    def _settle(self) -> None:
        """Go on from the pointer: an exception may have come just after it was moved."""
        newest = None
        with contextlib.suppress(CheckpointError):  # of another release
            newest = self._name.read()
        if newest is not None and newest.version.origin == self._origin:
            self.version = newest.version.number
            self._files.sort(key=lambda each: each == newest.descriptor)  # the newest comes last

    def _contents(self) -> Contents:
        contents = self._saved.contents()
        is_apart = host_by("pid") != self._host
        if is_apart and (contents.conversions or own_rows(contents, self._ranks)):
            raise CheckpointError(
                "is on another host, or in another container, than the first rank; expected ranks "
                "that see each other in /proc. Publish to a folder that all see (to=)"
            )
        return contents

    def _locked_file(self) -> int:
        """A file that is not the newest version and that nobody reads, locked."""
        for descriptor in self._files[:-1]:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        if len(self._files) < self._most:
            descriptor = os.memfd_create(self._name.memory, os.MFD_CLOEXEC)
            self._files.insert(0, descriptor)
            os.fchmod(descriptor, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor
        readers = _readers({os.fstat(each).st_ino for each in self._files})
        raise CheckpointError(
            f"found readers of every version but the newest ({', '.join(readers) or 'unknown'}), "
            "expected memory for one that nobody reads; let them drop their tensors (a process "
            "that a reader has forked has them, too, until it drops them or ends), or publish "
            f"with more than buffers={self._most}"
        )

    def _mapped(self, file: Path, nbytes: int) -> torch.Tensor:
        """The bytes of a version, to be written by all ranks. They stay mapped for the next one."""
        found = self._maps.get(file)
        if found is None or found.nbytes != nbytes:
            with file.open("r+b") as opened:
                memory = mmap.mmap(opened.fileno(), nbytes)
            found = self._maps[file] = torch.frombuffer(memory, dtype=torch.uint8)
        return found


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _resize(descriptor: int, nbytes: int) -> None:
    """Give a file in memory a size, and all of its pages: else a write could end the process.

    Raises:
        OSError: there is not enough memory.
    """
    if os.fstat(descriptor).st_size != nbytes:
        try:
            os.ftruncate(descriptor, nbytes)
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError:
            os.ftruncate(descriptor, 0)
            raise


def _readers(inodes: set[int]) -> list[str]:
    """The processes that have mapped versions to read them, as text.

    ``/proc/locks`` would name who has locked them, and not a child that was forked since: it has
    the same lock, and keeps it.
    """
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in maps.read_text(errors="replace").splitlines():
                _, access, _, _, inode, *path = line.split(maxsplit=5)
                is_ours = bool(path) and path[0].startswith("/memfd:weights ")
                if is_ours and access.endswith("p") and int(inode) in inodes:
                    found.add(int(maps.parent.name))
    return [f"process {process}{_command(process)}" for process in sorted(found)]


def _command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return f" ({b' '.join(words).decode(errors='replace').strip()[:80]})"


class MemoryReader:
    """The versions of one name, read in memory.

    Args:
        name: the name.

    Attributes:
        look_seconds: seconds between two looks at whether there is a newer version.
    """

    look_seconds = LOOK_SECONDS

    def __init__(self, name: str) -> None:
        self._name = _Name(name)

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none.

        Raises:
            CheckpointError: it is published by another release, or in another container.
        """
        pointer = self._live()
        return None if pointer is None else pointer.version

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
                    return pointer.version, found
        return None

    def _live(self) -> _Pointer | None:
        """The pointer, if its publisher still holds the file."""
        pointer = self._name.read()
        if pointer is None:
            return None
        if pointer.host == host_by("pid"):
            # The number of a process that has ended may be that of any other one now.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                called = f"/memfd:{self._name.memory} (deleted)"
                if os.readlink(pointer.file) == called:
                    return pointer if pointer.file.stat().st_ino == pointer.inode else None
        elif is_locked(self._name.lock):
            raise CheckpointError(
                f"{self._name.pointer}: is of another host or another container, expected "
                "processes that see each other in /proc. Publish to a folder that both see (to=)"
            )
        return None

    def _mapped(self, pointer: _Pointer) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Map a version; ``None`` if it has been replaced meanwhile.

        Raises:
            BlockingIOError: it is being written over.
            FileNotFoundError: its publisher has ended.
        """
        with pointer.file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if self._name.read() != pointer or os.fstat(file.fileno()).st_ino != pointer.inode:
                return None
            spans = read_header(Path(f"/proc/self/fd/{file.fileno()}"))
            # The map duplicates the descriptor, and with it holds the lock.
            memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE)
        return ((name, _tensor(memory, span)) for name, span in spans.items())


def _tensor(memory: mmap.mmap, span: StoredSpan) -> torch.Tensor:
    """A tensor that shares memory with a map, and keeps it."""
    dtype, shape = torch_dtype(span.info.dtype), span.info.shape
    count = span.info.nbytes // dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=span.start).view(shape)
