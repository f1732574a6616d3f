"""Write a safetensors file from where the tensors lie.

Nothing is gathered in memory first: bytes go from the tensor to the file, and are hashed on the
way, while the processor has them at hand. Meanwhile another thread asks for what is written already
to go to the disk, so that the sync at the end has little left to wait for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shardwise.checkpoint.disk.dtypes import itemsize
from shardwise.checkpoint.disk.entries import TensorInfo
from shardwise.checkpoint.disk.headers import make_header

BLOCK = 4 << 20  # bytes that one checksum is of
_COPY = 4 << 20  # bytes copied at a time, of tensors that cannot be written from where they lie
_SYNC_EVERY = 32 << 20  # bytes


@dataclass(frozen=True)
class Part:
    """What is to be written.

    Attributes:
        key: its name in the file.
        dtype: the name of its dtype in files.
        shape: of it.
        data: gives it when its turn comes.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Tensor]

    @property
    def info(self) -> TensorInfo:
        """What is written."""
        return TensorInfo(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.info.nbytes


@dataclass(frozen=True)
class Written:
    """Where a part went.

    Attributes:
        offset: byte in the file where it begins.
        checksums: of its blocks, in hexadecimal digits.
    """

    offset: int
    checksums: tuple[str, ...]


def write_shard(path: Path, parts: Sequence[Part], block: int = BLOCK) -> dict[str, Written]:
    """Write a new file, and see it onto the disk.

    Args:
        path: of the file; there must be none.
        parts: in any order; larger elements are written first, so that all are aligned.
        block: bytes that one checksum is of.

    Returns:
        By key, where each part went.

    Raises:
        OSError: the disk is full, say.
    """
    ordered = sorted(parts, key=lambda part: -itemsize(part.dtype))
    header = make_header({part.key: part.info for part in ordered}, {})
    data = len(header)
    written: dict[str, Written] = {}
    with _File(path) as file:
        file.write(memoryview(header))
        for part in ordered:
            blocks = _Blocks(block)
            for chunk in _chunks(part.data(), block):
                file.write(chunk)
                blocks.update(chunk)
            written[part.key] = Written(data, blocks.end())
            data += part.nbytes
            if file.size != data:
                raise ValueError(f"{part.key}: wrote up to byte {file.size}, expected {data}")
    return written


class _File:
    """A file that is written in order, and synced when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = 0
        self._synced = 0
        self._syncing: threading.Thread | None = None
        self._handle = -1

    def __enter__(self) -> _File:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._path, flags, 0o666)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._syncing is not None:
                self._syncing.join()
            if kind is None:
                os.fsync(self._handle)
        except OSError as error:
            raise _named(error, self._path) from None
        finally:
            os.close(self._handle)

    def write(self, data: memoryview) -> None:
        try:
            while data.nbytes:
                count = os.write(self._handle, data)
                self.size += count
                data = data[count:]
        except OSError as error:
            raise _named(error, self._path) from None
        idle = self._syncing is None or not self._syncing.is_alive()
        if idle and self.size - self._synced >= _SYNC_EVERY:
            self._synced = self.size
            self._syncing = threading.Thread(target=self._sync)
            self._syncing.start()

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # the sync at the end will say so
            os.fdatasync(self._handle)


class _Blocks:
    """The checksums of what is written, block by block."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._digest = xxhash.xxh3_64()
        self._filled = 0
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: self._block - self._filled]
            self._digest.update(part)
            self._filled += part.nbytes
            data = data[part.nbytes :]
            if self._filled == self._block:
                self._finish()

    def end(self) -> tuple[str, ...]:
        if self._filled:
            self._finish()
        return tuple(self._done)

    def _finish(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest.reset()
        self._filled = 0


def _chunks(tensor: Tensor, limit: int) -> Iterator[memoryview]:
    """The bytes of a tensor in the order of its elements, at most ``limit`` at a time."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not _is_lazy(tensor):
        data = tensor.view(-1).view(torch.uint8).numpy().data
        yield from (data[at : at + limit] for at in range(0, data.nbytes, limit))
        return
    for part in _small(tensor):
        here = part.contiguous().cpu().resolve_conj().resolve_neg()
        yield here.view(-1).view(torch.uint8).numpy().data


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _small(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor in the order of its elements, none larger than what is copied at a time."""
    if tensor.nbytes <= _COPY or tensor.ndim == 0:
        yield tensor
        return
    rows = max(1, _COPY * tensor.shape[0] // tensor.nbytes)
    if rows > 1 or tensor.ndim == 1:
        yield from torch.split(tensor, rows)
        return
    for row in tensor:
        yield from _small(row)


def _named(error: OSError, path: Path) -> OSError:
    """The same error, with the name of the file."""
    return OSError(error.errno, error.strerror, str(path))
