"""What each rank has to save, in few bytes, and what the first rank finds out from all of them.

Of thousands of ranks, most have the same names, dtypes, shapes and values. They send these as the
same bytes, of which the first rank reads one copy. Where its part of each tensor lies, a rank sends
as numbers, and ranks answer each other in bits and numbers, one for each tensor:

    rank 1 has            model.weight    model.bias    step
    as numbers            row 2, 2 rows   element 2, 2  all
    has in common         no              no            yes         shared()
    digests               -               -             6f1c...
    writes                yes             yes           no          writers()

So the first rank's work is a few array operations for each tensor, and some bytes for each rank.
"""

from __future__ import annotations

import functools
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.checkpoint.planner import WriteItem

from shardwise.base.boxes import Box, is_tiling, row_major
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.columns import DIGEST, Numbers, Pieces
from shardwise.checkpoint.disk.entries import (
    Origin,
    StatePath,
    StoredPiece,
    TensorInfo,
    Value,
    dotted,
    dtype_name,
)
from shardwise.checkpoint.disk.manifest import MANY, MAX_BYTES
from shardwise.checkpoint.disk.safetensors import BLOCK
from shardwise.checkpoint.disk.values import RANKS, decode, encode
from shardwise.checkpoint.ranks.alike import RankState

_PIECE = 103  # bytes of a manifest that a part of a tensor takes at least, without checksums


@dataclass(frozen=True)
class Outline:
    """What a rank has to save, as it sends it.

    Attributes:
        common: names, dtypes, shapes, placements and values, of many ranks the same bytes.
        own: the same of what :func:`.per_rank` has wrapped.
        boxes: offsets and sizes of its part of each tensor, first of ``common``, then of ``own``.
    """

    common: bytes
    own: bytes
    boxes: bytes


def in_order(items: Iterable[WriteItem]) -> list[WriteItem]:
    """The items of a rank's plan in the order in which it speaks of them to other ranks."""
    return sorted(items, key=lambda item: _is_own(item.index.fqn))


def outline_of(
    items: Iterable[WriteItem], origins: Mapping[str, Origin], values: Iterable[Value]
) -> Outline:
    """Make the outline of a rank.

    Args:
        items: what it has of tensors, :func:`in_order`.
        origins: where they are in the state, by name.
        values: everything else.
    """
    tensors: tuple[list[Any], list[Any]] = ([], [])
    boxes: list[int] = []
    for item in items:
        data, origin = item.tensor_data, origins[item.index.fqn]
        assert data is not None
        described = (origin.path, dtype_name(data.properties.dtype), [*data.size])
        tensors[_is_own(item.index.fqn)].append((*described, origin.placements, origin.mesh))
        boxes += (*data.chunk.offsets, *data.chunk.sizes)
    rest: tuple[list[Any], list[Any]] = ([], [])
    for value in values:
        rest[RANKS in value.path].append((value.path, encode(value.value, dotted(value.path))))
    common, own = (
        zlib.compress(json.dumps(each).encode(), 1) for each in zip(tensors, rest, strict=True)
    )
    return Outline(common, own, packed(np.array(boxes, np.int64)))


def _is_own(name: str) -> bool:
    return f".{RANKS}." in name


def packed(numbers: Numbers) -> bytes:
    """Numbers as bytes."""
    return zlib.compress(numbers.tobytes(), 1)


def _unpacked(data: bytes) -> Numbers:
    return np.frombuffer(zlib.decompress(data), np.int64)


def chosen(items: Sequence[WriteItem], bits: bytes) -> list[WriteItem]:
    """The items of a rank that an answer of the first rank has a bit for."""
    found = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(items))
    return [items[at] for at in np.flatnonzero(found).tolist()]


def _kind(origin: Origin, info: TensorInfo) -> str:
    """What a rank has of a tensor, and how it is sharded, in words."""
    sharded = f", {origin.placements} on {origin.mesh}" if origin.placements else ""
    return f"{info.dtype} {list(info.shape)}{sharded}"


@dataclass(frozen=True)
class _Described:
    """What several ranks have, by their common bytes."""

    tensors: list[tuple[Origin, TensorInfo]]
    values: list[Value]

    @classmethod
    def read(cls, data: bytes) -> _Described:
        tensors, values = json.loads(zlib.decompress(data))
        return cls(
            [
                (Origin(tuple(path), placements, mesh), TensorInfo(dtype, tuple(shape)))
                for path, dtype, shape, placements, mesh in tensors
            ],
            [Value(tuple(path), decode(value, dotted(path))) for path, value in values],
        )


class _Alike:
    """Ranks that have the same tensors: a row for each rank, a column for each tensor.

    Attributes:
        ranks: their numbers, in ascending order.
        tensors: what they have.
        shared: whether another rank has the same part.
        digests: of what is shared.
        writes: whether this rank writes it.
    """

    def __init__(
        self, ranks: list[int], tensors: list[tuple[Origin, TensorInfo]], boxes: Numbers
    ) -> None:
        self.ranks, self.tensors, self._boxes = np.array(ranks, np.int64), tensors, boxes
        shape = len(ranks), len(tensors)
        self.shared, self.writes = np.zeros(shape, bool), np.zeros(shape, bool)
        self.digests = np.zeros(shape, np.int64)
        ends = np.cumsum([0, *(2 * len(info.shape) for _, info in tensors)])
        self._spans = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]

    def parts(self, column: int) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
        """The parts of a tensor.

        Returns:
            A number for where each begins, how many elements each has, and whether it counts: one
            without elements does if the tensor has none.
        """
        info = self.tensors[column][1]
        offsets, lengths = self.boxes(column)
        # One more than the sizes, so that a part that begins at an end has a number of its own.
        steps = row_major([size + 1 for size in info.shape])
        sizes = lengths.prod(axis=1)
        counts = (sizes > 0) | (info.numel == 0)
        starts: Numbers = offsets @ np.array(steps, np.int64)
        return starts, sizes, counts

    @functools.cached_property
    def blocks(self) -> Numbers:
        """How many checksums there are of what is written: a row for each tensor."""
        found = np.zeros(self.writes.T.shape, np.int64)
        for column, (_, info) in enumerate(self.tensors):
            found[column] = -(-self.boxes(column)[1].prod(axis=1) * info.itemsize // BLOCK)
        return found * self.writes.T

    def boxes(self, column: int) -> tuple[Numbers, Numbers]:
        """The offsets and the sizes of the parts of a tensor, a row for each rank."""
        numbers = self._boxes[:, self._spans[column]]
        half = numbers.shape[1] // 2
        return numbers[:, :half], numbers[:, half:]

    def box(self, row: int, column: int) -> Box:
        """The part of a tensor that a rank has."""
        offsets, sizes = self.boxes(column)
        return Box(tuple(offsets[row].tolist()), tuple(sizes[row].tolist()))


class _Holders:
    """The ranks that have elements of a tensor, sorted by the parts that they have.

    If the tensor has no elements, these are all ranks that have the tensor.

    Args:
        held: the tensor, as a column of ranks that are alike.

    Attributes:
        ranks: their numbers; of those with the same part, in ascending order.
        sizes: how many elements each has.
        first: whether it is the first of those with the same part.
    """

    def __init__(self, held: list[tuple[_Alike, int]]) -> None:
        self._held = held
        parts = [alike.parts(column) for alike, column in held]
        starts, sizes, counts = (np.concatenate(each) for each in zip(*parts, strict=True))
        ranks = np.concatenate([alike.ranks for alike, _ in held])
        order = np.lexsort((ranks, starts))
        self._order: NDArray[np.intp] = order[counts[order]]
        order = self._order
        self.ranks, self.sizes, starts = ranks[order], sizes[order], starts[order]
        self.first = np.ones(len(order), bool)
        self.first[1:] = starts[1:] != starts[:-1]

    @property
    def parts(self) -> Numbers:
        """The number of the part that each has."""
        return np.cumsum(self.first) - 1

    def firsts(self) -> Iterator[tuple[TensorInfo, Box]]:
        """For each part, what the first rank that has it has."""
        rows = [(alike, row, at) for alike, at in self._held for row in range(len(alike.ranks))]
        for alike, row, column in (rows[at] for at in self._order[self.first].tolist()):
            yield alike.tensors[column][1], alike.box(row, column)

    def note(self, table: str, values: NDArray[Any]) -> None:
        """Write a value for each into a table of :class:`_Alike`."""
        everyone = np.zeros(sum(len(alike.ranks) for alike, _ in self._held), values.dtype)
        everyone[self._order] = values
        for alike, column in self._held:
            mine, everyone = np.split(everyone, [len(alike.ranks)])
            getattr(alike, table)[:, column] = mine

    def noted(self, table: str) -> NDArray[Any]:
        """What such a table says of each."""
        columns = [getattr(alike, table)[:, column] for alike, column in self._held]
        return np.concatenate(columns)[self._order]


class Outlines:
    """The outlines of all ranks, which the first of them compares.

    Args:
        outlines: in the order of ranks.
        names: the numbers of the ranks, for messages; by default, those of the outlines.

    Attributes:
        infos: dtypes and shapes of all tensors, by name, in the order of the state.
        origins: where they are in the state. If ranks differ, the first counts.
        values: everything else, each once.
    """

    def __init__(self, outlines: Sequence[Outline], names: Sequence[int] = ()) -> None:
        self._names = names or range(len(outlines))
        alike: dict[bytes, list[int]] = {}
        for rank, outline in enumerate(outlines):
            alike.setdefault(outline.common, []).append(rank)
        common = {data: _Described.read(data) for data in alike}
        self._own = [_Described.read(outline.own) for outline in outlines]
        numbers = [_unpacked(outline.boxes) for outline in outlines]
        #: By rank, its rows of two tables: of what it has as others have it, and of its own.
        self._rows: list[list[tuple[_Alike, int]]] = [[] for _ in outlines]
        #: What those that are the first of their kind have as others have it.
        self._firsts = {ranks[0]: common[data] for data, ranks in alike.items()}
        for data, ranks in alike.items():
            width = 2 * sum(len(info.shape) for _, info in common[data].tensors)
            rows = np.stack([numbers[rank][:width] for rank in ranks])
            self._add(_Alike(ranks, common[data].tensors, rows))
            for rank in ranks:
                self._add(_Alike([rank], self._own[rank].tensors, numbers[rank][None, width:]))
        self.infos: dict[str, TensorInfo] = {}
        self.origins: dict[str, Origin] = {}
        self._columns: dict[str, list[tuple[_Alike, int]]] = {}
        for table in dict.fromkeys(table for rows in self._rows for table, _ in rows):
            for column, (origin, info) in enumerate(table.tensors):
                name = dotted(origin.path)
                self.infos.setdefault(name, info)
                self.origins.setdefault(name, origin)
                self._columns.setdefault(name, []).append((table, column))
        values: dict[StatePath, Value] = {}
        for value in (each for one in (*common.values(), *self._own) for each in one.values):
            values.setdefault(value.path, value)
        self.values = list(values.values())
        self._shared: dict[str, _Holders] = {}
        #: By rank, how many bytes it writes.
        self._loads = np.zeros(len(outlines), np.int64)

    def _add(self, table: _Alike) -> None:
        for row, rank in enumerate(table.ranks.tolist()):
            self._rows[rank].append((table, row))

    def shared(self) -> list[bytes]:
        """Find what several ranks have the same part of.

        Returns:
            For each rank, a bit for each of its tensors.

        Raises:
            CheckpointError: ranks do not have all elements of a tensor, or have some twice, or have
                parts of tensors of other shapes or dtypes. Or there are more parts than a manifest
                can name.
        """
        least = 0
        for name, columns in self._columns.items():
            holders, info = _Holders(columns), self.infos[name]
            self._check_fit(name, holders)
            found = int(holders.sizes[holders.first].sum())
            if found != info.numel:
                raise CheckpointError(
                    f"{name}: found parts of {found:,} elements on all ranks together, expected "
                    f"the {info.numel:,} of a tensor of {list(info.shape)}"
                )
            blocks = -(-holders.sizes[holders.first] * info.itemsize // BLOCK)
            pieces, sums = int((blocks > 0).sum()), DIGEST * int(blocks.sum())
            least += sums * 4 // 3 if pieces >= MANY else pieces * _PIECE + 2 * sums
            if holders.first.all():
                self._assign(name, holders, holders.first)
            else:
                parts = holders.parts
                holders.note("shared", np.bincount(parts)[parts] > 1)
                self._shared[name] = holders
        if least > MAX_BYTES:
            raise CheckpointError(
                f"found parts of tensors that take a manifest of {least >> 20:,} MiB or more, "
                f"expected at most {MAX_BYTES >> 20:,}; shard over fewer ranks, with replicas "
                "(hybrid)"
            )
        return self._bits("shared")

    def _check_fit(self, name: str, holders: _Holders) -> None:
        """Check that parts fit together, if ranks have sharded a tensor in different ways.

        Raises:
            CheckpointError: they are no parts of one tensor.
        """
        kinds: dict[str, int] = {}
        for table, column in self._columns[name]:
            kinds.setdefault(_kind(*table.tensors[column]), self._names[table.ranks[0]])
        if len(kinds) == 1:
            return
        expected, parts = self.infos[name], list(holders.firsts())
        alike = all(info == expected for info, _ in parts)
        if not alike or not is_tiling([box for _, box in parts], expected.shape):
            (one, rank), (other, another) = itertools.islice(kinds.items(), 2)
            raise CheckpointError(
                f"{name}: found {one} on rank {rank} and {other} on rank {another}, expected parts "
                "that make up one tensor; shard it in the same way on all ranks"
            )

    def states(self, digests: Sequence[bytes]) -> list[RankState]:
        """What ranks hold, without what is known to be alike.

        Args:
            digests: those that each rank has made of what is shared.
        """
        for rows, data in zip(self._rows, digests, strict=True):
            numbers = np.frombuffer(data, np.int64)
            for table, row in rows:
                mine = table.shared[row]
                table.digests[row, mine], numbers = np.split(numbers, [mine.sum()])
        differ: list[dict[Any, str]] = [{} for _ in digests]
        for name, holders in self._shared.items():
            found, parts = holders.noted("digests"), holders.parts
            if (found != found[holders.first][parts]).any():
                path = self.origins[name].path
                for rank, part, digest in zip(holders.ranks, parts, found, strict=True):
                    differ[rank][path, (int(part),)] = str(digest)
        return [
            RankState(
                [origin.path for each in known for origin, _ in each.tensors],
                [value for each in known for value in each.values],
                differ[rank],
            )
            for rank, own in enumerate(self._own)
            for known in [[self._firsts[rank], own] if rank in self._firsts else [own]]
        ]

    def writers(self, *, lowest: bool) -> list[bytes]:
        """Choose who writes what, each part once.

        Args:
            lowest: the lowest of the ranks that have it; else the one that has least to write yet.

        Returns:
            For each rank, a bit for each of its tensors.
        """
        for name, holders in self._shared.items():
            chosen = holders.first
            if not lowest:
                order = np.lexsort((self._loads[holders.ranks], holders.parts))
                chosen = np.zeros(len(order), bool)
                chosen[order[holders.first]] = True
            self._assign(name, holders, chosen)
        return self._bits("writes")

    def _assign(self, name: str, holders: _Holders, writes: NDArray[np.bool_]) -> None:
        """Let ranks write what they have of a tensor, if that has elements."""
        writes = writes & (holders.sizes > 0)
        self._loads[holders.ranks[writes]] += holders.sizes[writes] * self.infos[name].itemsize
        holders.note("writes", writes)

    def _bits(self, table: str) -> list[bytes]:
        return [
            np.packbits(np.concatenate([getattr(each, table)[row] for each, row in rows])).tobytes()
            for rows in self._rows
        ]

    def pieces(
        self, written: Sequence[tuple[bytes, bytes]], files: Sequence[str]
    ) -> dict[str, Pieces]:
        """What was written, by the name of the tensor.

        Args:
            written: what each rank says of what it has written; see :func:`summary`.
            files: the names of their files.
        """
        places: dict[_Alike, list[Numbers]] = {}
        digests: dict[_Alike, list[Numbers]] = {}
        for rows, (offsets, digits) in zip(self._rows, written, strict=True):
            left, rest = _unpacked(offsets), np.frombuffer(digits, np.int64)
            for table, row in rows:
                mine, left = np.split(left, [table.writes[row].sum()])
                sums, rest = np.split(rest, [table.blocks[:, row].sum()])
                places.setdefault(table, []).append(mine)
                digests.setdefault(table, []).append(sums)
        stored = {
            table: _Stored(table, np.concatenate(places[table]), np.concatenate(digests[table]))
            for table in places
        }
        names = tuple(files)
        return {
            name: _joined([stored[table].pieces(column, names) for table, column in columns])
            for name, columns in self._columns.items()
        }


class _Stored:
    """What ranks that are alike have written, and where.

    Args:
        table: the ranks.
        places: bytes of their files at which parts begin, of one rank after the other.
        digests: the checksums of the parts, likewise.
    """

    def __init__(self, table: _Alike, places: Numbers, digests: Numbers) -> None:
        self._table, self._digests = table, digests
        found = np.zeros(table.writes.shape, np.int64)
        found[table.writes] = places
        ends = table.blocks.T.ravel().cumsum().reshape(found.shape)
        # What is said of one tensor lies together: it is looked up for one after the other.
        self._places, self._ends = np.ascontiguousarray(found.T), np.ascontiguousarray(ends.T)
        self._writes = np.ascontiguousarray(table.writes.T)

    def pieces(self, column: int, files: tuple[str, ...]) -> Pieces:
        """The pieces of a tensor."""
        rows = np.flatnonzero(self._writes[column])
        offsets, sizes = self._table.boxes(column)
        counts = self._table.blocks[column, rows]
        ends = counts.cumsum()
        # The number of each checksum among all.
        at = np.arange(counts.sum()) + (self._ends[column, rows] - ends).repeat(counts)
        return Pieces(
            files,
            self._table.ranks[rows],
            self._places[column, rows],
            tuple(offsets[rows].T),
            tuple(sizes[rows].T),
            ends,
            self._digests[at].tobytes(),
        )


def _joined(parts: list[Pieces]) -> Pieces:
    """One of several, if only one has any."""
    some = [each for each in parts if len(each)] or parts
    if len(some) == 1:
        return some[0]
    ordered = sorted((piece for each in some for piece in each), key=lambda each: each.file)
    return Pieces.of(ordered, some[0].files)


def summary(stored: Iterable[StoredPiece]) -> tuple[bytes, bytes]:
    """What a rank says of what it has written: where in its file, and the checksums."""
    pieces = list(stored)
    sums = "".join(each for piece in pieces for each in piece.checksums)
    return packed(np.array([piece.offset for piece in pieces], np.int64)), bytes.fromhex(sums)
