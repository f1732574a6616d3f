"""Reading from an object store: ranges are asked for ahead of time, in few requests.

A request takes as long as many megabytes. So ranges that follow each other are read together, and
several at a time, in the order in which they will be needed. Nothing else is read, but for the
beginning of each file.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.base.boxes import Box
from shardwise.base.files import Closing
from shardwise.checkpoint.disk.columns import parts_in
from shardwise.checkpoint.disk.entries import TensorEntry
from shardwise.checkpoint.disk.store_path import StorePath

_PART = 8 << 20  # bytes of a request
_GAP = 16 << 10  # bytes that are read for nothing rather than with another request
_HELD = 32 << 20  # bytes of all answers that are waited for or not read yet
_REQUESTS = 3  # at a time, each of which takes twice its bytes for a moment
_HEAD = 32 << 10  # bytes that are read of each file, of which its size is learned: most headers


@dataclass(eq=False)
class _RangeRead:
    """A range of a file that is read with one request."""

    file: str
    start: int
    end: int
    place: int  # in the order in which parts are needed
    left: int  # bytes that have not been read
    answer: Future[tuple[memoryview, int]] | None = None


class StoreReads(Closing):
    """What is read of one checkpoint.

    Args:
        folder: name of the checkpoint.
        files: bytes that its files should have.
        block: bytes that one checksum covers.
        tags: what tells some of the files from others of the same name; see :meth:`StorePath.read`.
    """

    def __init__(
        self,
        folder: StorePath,
        files: Mapping[str, int],
        block: int = 1,
        tags: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        self._folder, self._files = folder, files
        self._block, self._tags = block, tags
        self._parts: list[_RangeRead] = []
        self._of_file: dict[str, list[_RangeRead]] = {}  # sorted, without overlaps
        self._asked: dict[_RangeRead, None] = {}  # in order
        self._held = 0
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="shardwise store")

    def close(self) -> None:
        """Forget what has not been read."""
        self._pool.shutdown(cancel_futures=True)

    def expect(self, parts: Iterable[tuple[TensorEntry, Box]]) -> None:
        """Plan to read parts of tensors, in this order: of each, all blocks with some of it."""
        block = self._block
        for entry, box in parts:
            for piece, common in parts_in(entry.pieces, box):
                first, end = common.relative_to(piece.box.offsets).span(piece.box.sizes)
                start = first * entry.itemsize // block * block
                stop = -(-end * entry.itemsize // block) * block
                stop = min(stop, piece.box.numel * entry.itemsize)
                self.want(piece.file, piece.offset + start, piece.offset + stop)

    def has(self, file: str) -> bool:
        """Whether it is one of the files."""
        return file in self._files

    def open(self, file: str) -> StoreFile:
        """Open one of the files."""
        return StoreFile(self._folder / file, self, self._files[file])

    def want(self, file: str, start: int, end: int) -> None:
        """Plan to read a range of a file."""
        known = self._of_file.setdefault(file, [])
        while start < end:
            at = bisect.bisect_right(known, start, key=lambda part: part.start)
            before = known[at - 1] if at else None
            if before is not None and start < before.end:
                start = before.end
                continue
            stop = min(end, known[at].start) if at < len(known) else end
            near = before is not None and start <= min(before.end + _GAP, before.start + _PART - 1)
            if before is not None and near and before.answer is None:
                stop = min(stop, before.start + _PART)
                before.end, before.left = stop, before.left + stop - start
            else:
                stop = min(stop, start + _PART)
                part = _RangeRead(file, start, stop, len(self._parts), stop - start)
                self._parts.append(part)
                known.insert(at, part)
            start = stop

    def read(self, file: str, into: memoryview, at: int) -> None:
        """Fill memory from a byte of a file on."""
        self.want(file, at, at + into.nbytes)
        known = self._of_file[file]
        while into.nbytes:
            part = known[bisect.bisect_right(known, at, key=lambda part: part.start) - 1]
            data = self._answer(part)[at - part.start :][: into.nbytes]
            into[: data.nbytes] = data
            part.left -= data.nbytes
            if part.left <= 0:
                self._drop(part)
            at, into = at + data.nbytes, into[data.nbytes :]

    def _answer(self, part: _RangeRead) -> memoryview:
        if part.answer is None:
            self._ask(part, part)
        for ahead in itertools.islice(self._parts, part.place + 1, None):
            if self._held + ahead.end - ahead.start > _HELD:
                break
            if ahead.answer is None and ahead.left > 0:
                self._ask(ahead, part)
        assert part.answer is not None
        return part.answer.result()[0]

    def _ask(self, part: _RangeRead, needed: _RangeRead) -> None:
        size = part.end - part.start
        while self._held + size > _HELD and (
            other := next((each for each in self._asked if each is not needed), None)
        ):
            self._drop(other)  # it was asked for first, and has not been needed
        part.left = part.left if part.left > 0 else size
        path = self._folder / part.file
        tag = self._tags.get(part.file)
        part.answer = self._pool.submit(path.read, part.start, part.end, tag)
        self._asked[part] = None
        self._held += size

    def _drop(self, part: _RangeRead) -> None:
        part.answer = None
        self._held -= part.end - part.start
        del self._asked[part]


class StoreFile(Closing):
    """A file in an object store, open to read.

    Args:
        path: its name.
        reads: what is read of its checkpoint.
        size: bytes that it should have.

    Attributes:
        size: bytes that it has.

    Raises:
        CheckpointError: it is missing, or has fewer bytes.
    """

    def __init__(self, path: StorePath, reads: StoreReads, size: int) -> None:
        self._name, self._reads = path.name, reads
        self._head, self.size = path.read(0, min(size, _HEAD)) if size else (memoryview(b""), 0)

    def read(self, into: memoryview, at: int) -> None:
        """Fill memory from a byte on. No element begins where the header does."""
        if at <= 8 and at + into.nbytes <= self._head.nbytes:
            into[:] = self._head[at : at + into.nbytes]
            self._head = self._head if at == 0 else memoryview(b"")
        else:
            self._reads.read(self._name, into, at)
