"""A host's memory for versions of a training: files in a folder that outlive the ranks.

    00002-9f86d081a3c4e5f6-step-00000040/        a version: session, its own number, step
      unique/shard-00003-of-00006.safetensors    what rank 3 holds and no other host does
      unique/shard-00003-of-00006.json           its manifest, written last
      common/...                                 what rank 3 holds and another host does, too

Without its manifest a file is not there, and with a wrong checksum neither. So a process may be
killed at any moment. A file of the version before the last is written over by the next: its memory
is the system's to give only once.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shardwise.base.boxes import Box
from shardwise.base.errors import CheckpointError
from shardwise.base.files import read_small, replace_file
from shardwise.checkpoint.disk.entries import (
    Manifest,
    StoredPiece,
    TensorEntry,
    Value,
    shard_name,
    torch_dtype,
)
from shardwise.checkpoint.disk.manifest import MAX_BYTES, manifest_bytes, parse_part
from shardwise.checkpoint.disk.pieces import PieceReader
from shardwise.checkpoint.disk.safetensors import BLOCK, PieceData, lay_out

_NAME = re.compile(r"(\d{5,})-([0-9a-f]{16})-step-(\d{8,})", re.ASCII)
_SHARD = re.compile(r"shard-(\d{5,9})-of-(\d{5,9})\.json", re.ASCII)


@dataclass(frozen=True, order=True)
class KeptVersion:
    """A version of a training. Of two, the later one is greater.

    Attributes:
        session: the number of the session that made it: each begins with what the one before left.
        own: a random number of the session, in 16 hexadecimal digits.
        step: the step after which it was made.
    """

    session: int
    own: str
    step: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.session:05}-{self.own}-step-{self.step:08}"


class KeptPart(enum.Enum):
    """A part of what a rank holds, and its file."""

    UNIQUE = "unique"  # no other host holds it
    COMMON = "common"  # another host holds it, too


@dataclass(frozen=True)
class KeptFile:
    """A file of a version.

    Attributes:
        folder: the host's folder.
        version: the version.
        part: which part of what the rank holds.
        rank: the rank that held it.
        world_size: the number of ranks then.
    """

    folder: Path
    version: KeptVersion
    part: KeptPart
    rank: int
    world_size: int

    @property
    def path(self) -> Path:
        """Where its elements are."""
        name = shard_name(self.rank, self.world_size)
        return self.folder / self.version.name / self.part.value / name

    @property
    def manifest_path(self) -> Path:
        """Where its manifest is."""
        return self.path.with_suffix(".json")

    def make(self, nbytes: int, before: KeptFile | None) -> mmap.mmap:
        """Make it, without a manifest, in memory that is set aside.

        Args:
            nbytes: its size.
            before: one that is no longer needed, whose memory it takes over.

        Raises:
            OSError: the folder has no room for it.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.manifest_path.unlink(missing_ok=True)
        if before is not None:
            before.manifest_path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                before.path.rename(self.path)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(handle, nbytes)
            os.posix_fallocate(handle, 0, nbytes)  # else a write without room would be a signal
            return mmap.mmap(handle, nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        finally:
            os.close(handle)

    def complete(self, manifest: bytes) -> None:
        """Write its manifest: from now on it is there.

        Raises:
            OSError: it cannot be written.
        """
        replace_file(self.manifest_path, manifest)

    def read(self) -> Manifest:
        """Read its manifest.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        text = read_small(self.manifest_path, MAX_BYTES)
        found = parse_part(text, str(self.manifest_path), len(text) + self._size)
        if {*found.files} != {self.path.name} or found.world_size != self.world_size:
            raise CheckpointError(f"{self.manifest_path}: is the manifest of another file")
        return found

    @property
    def _size(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def verify(self, manifest: Manifest) -> None:
        """Compare every checksum.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        with PieceReader(self.path.parent, manifest) as reader:
            for entry in manifest.tensors:
                for piece in entry.pieces:
                    for _ in reader.stream(entry, piece):
                        pass

    def pieces(self, manifest: Manifest) -> Iterator[tuple[TensorEntry, Box, Tensor]]:
        """Yield its pieces, in memory that is the file's until something is written there."""
        with self.path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for entry in manifest.tensors:
            dtype = torch_dtype(entry.dtype)
            for piece in entry.pieces:
                count = piece.box.numel
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=piece.offset)
                yield entry, piece.box, flat.view(piece.box.sizes)


class FileWriter:
    """A file that is being written: first the elements, at once, and later their checksums.

    Args:
        file: the file.
        entries: all tensors of this rank, by name, without pieces.
        pieces: what the file has of them, which is copied from wherever it is.
        before: a file whose memory it takes over.

    Attributes:
        memory: the file.

    Raises:
        OSError: the folder has no room for it.
    """

    def __init__(
        self,
        file: KeptFile,
        entries: Mapping[str, TensorEntry],
        pieces: Iterable[PieceData],
        before: KeptFile | None,
    ) -> None:
        self._file, self._entries = file, entries
        by_key = {each.key: each for each in pieces}
        infos = {key: each.own_info for key, each in by_key.items()}
        header, offsets = lay_out(infos, {})
        size = len(header) + sum(info.nbytes for info in infos.values())
        self.memory = file.make(size, before)
        self.memory[: len(header)] = header
        #: Of each piece: whose it is, which part, and where it begins and ends.
        self._places = [
            (each.fqn, each.box, offsets[key], offsets[key] + infos[key].nbytes)
            for key, each in by_key.items()
        ]
        for key, piece in by_key.items():
            if count := piece.box.numel:
                dtype = torch_dtype(piece.info.dtype)
                flat = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offsets[key])
                flat.view(piece.box.sizes).copy_(piece.load().detach())

    def complete(self, values: Iterable[Value]) -> bytes:
        """Write the manifest, and return what it contains.

        Args:
            values: what is to be in it beside tensors.

        Raises:
            OSError: it cannot be written.
        """
        pieces: dict[str, list[StoredPiece]] = {}
        data = memoryview(self.memory)
        for name, box, start, end in self._places:
            piece = StoredPiece(self._file.path.name, start, box, _checksums(data[start:end]))
            pieces.setdefault(name, []).append(piece)
        tensors = (
            replace(entry, pieces=tuple(pieces.get(name, ())))
            for name, entry in self._entries.items()
            if name in pieces or not entry.info.numel
        )
        text = manifest_bytes(
            Manifest(
                tensors=tuple(tensors),
                values=tuple(values),
                files={self._file.path.name: len(self.memory)},
                block=BLOCK,
                world_size=self._file.world_size,
            )
        )
        self._file.complete(text)
        return text


def _checksums(data: memoryview) -> tuple[str, ...]:
    starts = range(0, data.nbytes, BLOCK)
    return tuple(xxhash.xxh3_64(data[at : at + BLOCK]).hexdigest() for at in starts)


def kept_files(folder: Path) -> list[KeptFile]:
    """All files in a host's folder that are complete, in an order that does not change."""
    found = []
    for path in sorted(folder.glob("*/*/*.json")):
        version, shard = version_of(path.parent.parent), _SHARD.fullmatch(path.name)
        if version and shard and path.parent.name in {part.value for part in KeptPart}:
            numbers = map(int, shard.groups())
            found.append(KeptFile(folder, version, KeptPart(path.parent.name), *numbers))
    return found


def version_of(folder: Path) -> KeptVersion | None:
    """The version in a folder; ``None`` if it has not the name of one."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else KeptVersion(int(found[1]), found[2], int(found[3]))


def keep_only(folder: Path, versions: Iterable[KeptVersion]) -> None:
    """Delete all versions in a host's folder but some."""
    kept = {version.name for version in versions}
    for each in folder.iterdir():
        if each.name not in kept and version_of(each) is not None:
            shutil.rmtree(each, ignore_errors=True)


def bytes_in(folder: Path) -> tuple[int, int]:
    """The bytes that are free where a host's folder is, and those that its files have."""
    found = os.statvfs(folder)
    sizes = (os.stat(path).st_blocks * 512 for path in folder.glob("*/*/*.safetensors"))
    return found.f_bavail * found.f_frsize, sum(sizes)
