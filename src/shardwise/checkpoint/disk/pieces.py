"""Reading pieces of a checkpoint: never more than asked for, never past a wrong checksum.

A file is opened once, safely, and its header must say the same about each piece as the manifest.
Bytes are read in chunks of at most ``buffer`` bytes, hashed while the processor still has them in
its cache, and go straight to where they belong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from shardwise.base.boxes import Box, boxes_of_span, narrow
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Closing, open_file, read_exactly
from shardwise.base.strict import refuse
from shardwise.checkpoint.disk.columns import parts_in
from shardwise.checkpoint.disk.entries import Manifest, StoredPiece, TensorEntry, torch_dtype
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.disk.safetensors import as_bytes, is_lazy, read_fields

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath
    from shardwise.checkpoint.disk.store_reads import StoreFile, StoreReads

CHUNK = 1 << 20  # bytes that are read and hashed at a time: they fit in a core's own cache
LEAST_BUFFER = 4096
_AHEAD = 32 << 20  # bytes that the kernel is asked to read before they are needed
_ALIGN = 16  # bytes: a multiple of every element size, and a divisor of every block


class PieceReader(Closing):
    """A reader of the pieces of one checkpoint. Close it, or use it in a ``with`` statement.

    Args:
        folder: the checkpoint's folder, or its name in an object store.
        manifest: its manifest.
        buffer: bytes that reading may hold beside the tensors that are read into; at least 4096.
            More than 1 MiB gains nothing. From a store, 32 MiB are read ahead in any case.

    Raises:
        ValueError: the buffer is too small.
    """

    def __init__(self, folder: Place, manifest: Manifest, *, buffer: int = CHUNK) -> None:
        if buffer < LEAST_BUFFER:
            raise ValueError(f"buffer: found {buffer} bytes, expected {LEAST_BUFFER} or more")
        self._folder = folder
        self._manifest = manifest
        self._ahead = None if isinstance(folder, Path) else _reads_of(folder, manifest)
        self._chunk = min(buffer, CHUNK) // _ALIGN * _ALIGN
        self._scratch = torch.empty(self._chunk, dtype=torch.uint8)
        self._files: dict[str, _ShardFile] = {}

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._ahead is not None:
            self._ahead.close()

    def expect(self, parts: Iterable[tuple[TensorEntry, Box]]) -> None:
        """Say what will be read, in this order. Only reading from an object store gains by it.

        Args:
            parts: tensors, and which part of each.
        """
        if self._ahead is not None:
            self._ahead.expect(parts)

    def open(self, entry: TensorEntry, piece: StoredPiece) -> _ShardFile:
        """Open the file of a piece, and compare its header with the manifest.

        Raises:
            CheckpointError: the file is missing, has another size, or its header says something
                else.
        """
        file = self._files.get(piece.file)
        if file is None:
            path, size = self._folder / piece.file, self._manifest.files[piece.file]
            opened = self._ahead.open(piece.file) if self._ahead else _OpenFile(Path(path))
            file = self._files[piece.file] = _ShardFile(path, size, opened)
        file.check(entry, piece)
        return file

    def read_into(
        self, entry: TensorEntry, piece: StoredPiece, box: Box, destination: Tensor
    ) -> None:
        """Read a part of a piece.

        Every block that contains some of it is read in full and verified. If this raises, the
        destination may hold some of what was read.

        Args:
            entry: the tensor.
            piece: one of its pieces.
            box: the part, in indices of the full tensor; inside the piece.
            destination: a tensor with the sizes of the box, and the dtype of the entry or one that
                it can be converted to; on any device, with any strides.

        Raises:
            CheckpointError: a file is missing or damaged, or a checksum does not match.
            ValueError: the destination has another shape.
        """
        if tuple(destination.shape) != box.sizes:
            raise ValueError(
                f"{entry.fqn}: found a destination of {list(destination.shape)}, "
                f"expected {list(box.sizes)}"
            )
        destination = destination.detach()
        inner = box.relative_to(piece.box.offsets)
        first, end = inner.span(piece.box.sizes)
        span = (first * entry.itemsize, end * entry.itemsize)
        is_one_run = end - first == box.numel
        dtype, direct = torch_dtype(entry.dtype), None
        # Whether stored bytes can be read into it as they are.
        fits = (
            is_one_run
            and destination.is_contiguous()
            and destination.device.type == "cpu"
            and destination.dtype == dtype
            and type(destination) is Tensor
            and not is_lazy(destination)
        )
        if fits:
            direct = as_bytes(destination)
            direct[:0].zero_()  # tells autograd of a write, since it does not see what is read
        for start, chunk in self._chunks(entry, piece, span, direct):
            if chunk is None:  # already where it belongs
                continue
            size = entry.itemsize
            elements = chunk.view(dtype)
            at = start // size
            for part in boxes_of_span(piece.box.sizes, at, at + chunk.numel() // size):
                common = part.intersection(inner)
                if common is None:
                    continue
                offset = part.span(piece.box.sizes)[0] - at
                source = elements[offset : offset + part.numel].view(part.sizes)
                narrow(destination, common.relative_to(inner.offsets)).copy_(
                    narrow(source, common.relative_to(part.offsets))
                )

    def stream(self, entry: TensorEntry, piece: StoredPiece) -> Iterator[memoryview]:
        """Yield the bytes of a piece, in order, in chunks; each is valid until the next one.

        Raises:
            CheckpointError: a file is missing or damaged, or a checksum does not match.
        """
        for _, chunk in self._chunks(entry, piece, (0, piece.box.numel * entry.itemsize), None):
            assert chunk is not None
            yield chunk.numpy().data

    def _chunks(
        self, entry: TensorEntry, piece: StoredPiece, span: tuple[int, int], direct: Tensor | None
    ) -> Iterator[tuple[int, Tensor | None]]:
        """Read the blocks that contain a range of bytes of a piece.

        Args:
            entry: the tensor.
            piece: one of its pieces.
            span: the bytes of the piece that are wanted: the first, and one past the last.
            direct: memory for exactly these bytes; chunks inside the range are read straight into
                it.

        Yields:
            Where a chunk begins in the piece, and its bytes; ``None`` if they went to ``direct``.
        """
        file = self.open(entry, piece)
        first, end = span
        block, nbytes = self._manifest.block, piece.box.numel * entry.itemsize
        for index in range(first // block, -(-end // block)):
            digest = xxhash.xxh3_64()
            block_end = min((index + 1) * block, nbytes)
            for start in range(index * block, block_end, self._chunk):
                size = min(self._chunk, block_end - start)
                inside = direct is not None and first <= start and start + size <= end
                target = direct[start - first :] if inside and direct is not None else self._scratch
                chunk = target[:size]
                file.read(piece.offset + start, chunk)
                digest.update(chunk.numpy().data)
                yield start, None if inside else chunk
            if digest.hexdigest() != piece.checksums[index]:
                raise CheckpointError(
                    f"{file.path}, {entry.key(piece)}: is damaged: bytes {index * block} .. "
                    f"{block_end} have the checksum {digest.hexdigest()}, expected "
                    f"{piece.checksums[index]}"
                )


def _reads_of(folder: StorePath, manifest: Manifest) -> StoreReads:
    from shardwise.checkpoint.disk.store_reads import StoreReads  # of no use to folders

    return StoreReads(folder, manifest.files, manifest.block)


class _OpenFile(Closing):
    """A file on a disk that is open to read.

    Raises:
        CheckpointError: it is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = 0  # the kernel has been asked for all bytes before this one
        self._handle, self.size = open_file(path)

    def close(self) -> None:
        os.close(self._handle)

    def read(self, into: memoryview, at: int) -> None:
        if at + into.nbytes > self._asked - _AHEAD // 2:
            start = max(at, self._asked)
            os.posix_fadvise(self._handle, start, _AHEAD, os.POSIX_FADV_WILLNEED)
            self._asked = start + _AHEAD
        read_exactly(self._handle, into, at, self._path)


class _ShardFile:
    """An open safetensors file of a checkpoint.

    Raises:
        CheckpointError: it has another size than expected, or its header is damaged.
    """

    def __init__(self, path: Place, size: int, opened: _OpenFile | StoreFile) -> None:
        self.path, self._opened = path, opened
        self.close = opened.close
        try:
            if opened.size != size:
                refuse(str(path), f"{opened.size:,} bytes", f"{size:,}, as the manifest says")
            self._data, self._header = read_fields(opened.read, size, path)
        except BaseException:
            self.close()
            raise

    def check(self, entry: TensorEntry, piece: StoredPiece) -> None:
        """Check that the header says the same about a piece as the manifest.

        Raises:
            CheckpointError: it does not.
        """
        key = entry.key(piece)
        start = piece.offset - self._data
        expected = {
            "dtype": entry.dtype,
            "shape": list(piece.box.sizes),
            "data_offsets": [start, start + piece.box.numel * entry.itemsize],
        }
        found = self._header.get(key)
        if found != expected:
            raise CheckpointError(
                f"{self.path}, {key}: found {json.dumps(found)[:200]} in its header, expected "
                f"{json.dumps(expected)[:200]}, as the manifest says"
            )

    def read(self, offset: int, into: Tensor) -> None:
        """Fill a tensor of bytes from an offset of the file."""
        self._opened.read(into.numpy().data, offset)


def read_box(reader: PieceReader, entry: TensorEntry, box: Box, destination: Tensor) -> None:
    """Read a part of a tensor, from all pieces that have some of it.

    Args:
        reader: a reader of the checkpoint.
        entry: the tensor.
        box: the part, inside the tensor.
        destination: a tensor with the sizes of the box; see :meth:`PieceReader.read_into`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for piece, common in parts_in(entry.pieces, box):
        target = narrow(destination, common.relative_to(box.offsets))
        reader.read_into(entry, piece, common, target)
