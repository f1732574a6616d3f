"""Which rank orthogonalizes which matrix: the same answer on all ranks, from shapes alone.

A matrix that lies on one rank as a whole, as an expert may, stays there, unless that rank has more
than its share of all work. The others are dealt with the most expensive one first, each to the rank
that would be done with it first.

    4 matrices of cost 4 3 3 2 on 2 ranks:        rank 0: 4 2        rank 1: 3 3

Then every rank's matrices are cut into *rounds*, so that the messages of one round can travel while
another round is computed, and so that only some matrices are in memory as a whole.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.base.portions import portions
from shardwise.optim.part import Part, Span

#: What moving one element to its owner and back costs, in floating-point operations.
MOVE = 1000
#: Bytes of whole matrices that one rank works on in a round, unless a single one is larger.
ROUND_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class DealtRows:
    """What one rank holds of a matrix.

    Attributes:
        at: index of the matrix in the leading dimensions of that rank's shard.
        rows: spans of rows of the whole matrix.
        columns: spans of columns.
    """

    at: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return _length(self.rows), _length(self.columns)

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix: a parameter, or one of a stack.

    Attributes:
        param: number of the parameter.
        index: of the matrix in the leading dimensions of the parameter.
        shape: ``(m, n)``.
        pieces: what each rank holds of it, by rank; ranks that hold nothing are missing.
    """

    param: int
    index: tuple[int, ...]
    shape: tuple[int, int]
    pieces: Mapping[int, DealtRows]

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def homes(self) -> list[int]:
        """The ranks that hold all of it."""
        return [rank for rank, piece in self.pieces.items() if piece.numel == self.numel]

    def sources(self, owner: int) -> dict[int, DealtRows]:
        """Return the pieces that make up the whole, by the rank that sends each to the owner.

        Of the ranks that hold the same piece the owner itself sends it, or the nearest one.
        """
        nearest: dict[tuple[object, object], int] = {}
        for rank in sorted(self.pieces, key=lambda rank: (abs(rank - owner), rank)):
            nearest.setdefault((self.pieces[rank].rows, self.pieces[rank].columns), rank)
        return {rank: self.pieces[rank] for rank in sorted(nearest.values())}


#: The matrices of each rank.
Dealt = tuple[tuple[Matrix, ...], ...]


def matrices_of(param: int, shape: Sequence[int], parts: Mapping[int, Part]) -> Iterator[Matrix]:
    """Yield the matrices of a parameter: one, or those of a stack.

    Args:
        param: number of the parameter.
        shape: of the full parameter: ``(..., m, n)``.
        parts: what each rank holds of it.
    """
    *leading, m, n = shape
    kept = {
        rank: ([_indices(spans) for spans in part[:-2]], part[-2], part[-1])
        for rank, part in parts.items()
        if _length(part[-2]) and _length(part[-1])
    }
    for index in itertools.product(*map(range, leading)):
        pieces = {
            rank: DealtRows(
                tuple(held[i] for held, i in zip(inside, index, strict=True)), rows, columns
            )
            for rank, (inside, rows, columns) in kept.items()
            if all(i in held for held, i in zip(inside, index, strict=True))
        }
        if pieces:
            yield Matrix(param, index, (m, n), pieces)


def deal(matrices: Sequence[Matrix], ranks: int, cost: Callable[[Matrix], int]) -> Dealt:
    """Deal matrices out to ranks.

    Args:
        matrices: all of them, in the same order on every rank.
        ranks: the number of ranks.
        cost: returns the floating-point operations of a matrix.

    Returns:
        The matrices of each rank.
    """
    own: list[list[Matrix]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    share = sum(map(cost, matrices)) / ranks
    left = []
    for matrix in sorted(matrices, key=cost, reverse=True):  # equal ones keep their order
        home = min(matrix.homes, key=lambda rank: (loads[rank], rank), default=None)
        if home is None or loads[home] + cost(matrix) > share:
            left.append(matrix)
        else:
            own[home].append(matrix)
            loads[home] += cost(matrix)
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)
    for matrix in left:
        load, owner = queue[0]
        own[owner].append(matrix)
        moved = 0 if owner in matrix.homes else MOVE * matrix.numel
        heapq.heapreplace(queue, (load + cost(matrix) + moved, owner))
    return tuple(map(tuple, own))


def rounds(dealt: Dealt, nbytes: Callable[[Matrix], int], limit: int = ROUND_BYTES) -> list[Dealt]:
    """Cut what each rank has to do into rounds.

    Args:
        dealt: the matrices of each rank.
        nbytes: returns the bytes of a whole matrix.
        limit: the bytes of one rank in one round; a larger matrix has a round to itself.

    Returns:
        The matrices of each rank in each round; ranks that are done have none.
    """
    by_rank = [map(tuple, portions(own, nbytes, limit)) for own in dealt]
    return [tuple(each) for each in itertools.zip_longest(*by_rank, fillvalue=())]


def _length(spans: Sequence[Span]) -> int:
    return sum(length for _, length in spans)


def _indices(spans: Sequence[Span]) -> dict[int, int]:
    """Where in its shard a rank holds each index of a dimension."""
    held = itertools.chain.from_iterable(range(first, first + n) for first, n in spans)
    return {index: at for at, index in enumerate(held)}
