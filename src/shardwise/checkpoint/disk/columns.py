"""The pieces of a tensor as columns of numbers: thousands of ranks write one each, of every tensor.

A :class:`StoredPiece` is made of them when it is asked for. So what looks at all pieces of a
checkpoint (checks, and the search for those that a rank needs) takes a few array operations for
each tensor. Torch is not imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shardwise.base.boxes import Box
from shardwise.checkpoint.disk.entries import StoredPiece

Numbers = NDArray[np.int64]
DIGEST = 8  # bytes of a checksum


@dataclass(frozen=True, eq=False)
class Pieces(Sequence[StoredPiece]):
    """Pieces of a tensor, in columns.

    Attributes:
        files: names of files.
        file: for each piece, which of the files it is in.
        offset: the byte of the file at which it begins.
        offsets: by dimension, the indices at which pieces begin.
        sizes: by dimension, how many indices they have.
        ends: how many checksums there are of each piece and all before it.
        digests: the checksums, 8 bytes each.
    """

    files: tuple[str, ...]
    file: Numbers
    offset: Numbers
    offsets: tuple[Numbers, ...]
    sizes: tuple[Numbers, ...]
    ends: Numbers
    digests: bytes

    @classmethod
    def of(cls, pieces: Sequence[StoredPiece], files: tuple[str, ...] = ()) -> Pieces:
        """The columns of pieces.

        Args:
            pieces: the pieces, or columns.
            files: names to number files by; by default, whatever has all that are needed.
        """
        if isinstance(pieces, Pieces):
            if not files or pieces.files == files:
                return pieces
            return replace(pieces, files=files, file=_renumbered(pieces.files, files)[pieces.file])
        files = files or tuple(dict.fromkeys(piece.file for piece in pieces))
        numbers = _numbered(files)
        rows = [
            (
                *(numbers[piece.file], piece.offset, len(piece.checksums)),
                *(*piece.box.offsets, *piece.box.sizes),
            )
            for piece in pieces
        ]
        file, offset, counts, *boxes = np.array(rows or np.empty((0, 3)), np.int64).T
        digests = bytes.fromhex("".join(each for piece in pieces for each in piece.checksums))
        half = len(boxes) // 2
        offsets, sizes = tuple(boxes[:half]), tuple(boxes[half:])
        return cls(files, file, offset, offsets, sizes, np.cumsum(counts), digests)

    def __len__(self) -> int:
        return len(self.file)

    @overload
    def __getitem__(self, at: int) -> StoredPiece: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StoredPiece, ...]: ...
    def __getitem__(self, at: int | slice) -> StoredPiece | tuple[StoredPiece, ...]:
        if isinstance(at, slice):
            return tuple(self[each] for each in range(len(self))[at])
        at = range(len(self))[at]
        offsets, sizes = (
            tuple(int(column[at]) for column in each) for each in (self.offsets, self.sizes)
        )
        first = int(self.ends[at - 1]) if at else 0
        digits = self.digests[first * DIGEST : int(self.ends[at]) * DIGEST].hex()
        width = 2 * DIGEST
        return StoredPiece(
            self.files[self.file[at]],
            int(self.offset[at]),
            Box(offsets, sizes),
            tuple(digits[each : each + width] for each in range(0, len(digits), width)),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    @property
    def numels(self) -> Numbers:
        """How many elements each has."""
        return math.prod(self.sizes, start=np.ones(len(self), np.int64))

    @property
    def first(self) -> tuple[str, int]:
        """The first of their files, and the first byte in it; ``("", 0)`` if there are none."""
        if not len(self):
            return "", 0
        number = self.file.min()
        return self.files[number], int(self.offset[self.file == number].min())


def files_of(many: Iterable[Sequence[StoredPiece]]) -> set[str]:
    """The names of the files that pieces are in."""
    found: set[str] = set()
    used: dict[tuple[str, ...], NDArray[np.bool_]] = {}
    for pieces in many:
        if not isinstance(pieces, Pieces):
            found.update(piece.file for piece in pieces)
            continue
        used.setdefault(pieces.files, np.zeros(len(pieces.files), bool))[pieces.file] = True
    return found.union(files[at] for files, each in used.items() for at in np.flatnonzero(each))


@functools.lru_cache(maxsize=2)
def _numbered(files: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, name in enumerate(files)}


@functools.lru_cache(maxsize=2)
def _renumbered(files: tuple[str, ...], others: tuple[str, ...]) -> Numbers:
    """For each name, its number among others; -1 if it is none of them."""
    numbers = _numbered(others)
    return np.array([numbers.get(name, -1) for name in files], np.int64)


def parts_in(pieces: Sequence[StoredPiece], box: Box) -> Iterator[tuple[StoredPiece, Box]]:
    """Yield the pieces that have elements of a box, and the box of these elements."""
    some: Iterable[StoredPiece] = pieces
    if isinstance(pieces, Pieces):
        found = np.ones(len(pieces), bool)
        for starts, sizes, first, size in zip(
            pieces.offsets, pieces.sizes, box.offsets, box.sizes, strict=False
        ):
            found &= (starts < first + size) & (starts + sizes > first)
        some = (pieces[at] for at in np.flatnonzero(found).tolist())
    for piece in some:
        common = piece.box.intersection(box)
        if common is not None:
            yield piece, common
