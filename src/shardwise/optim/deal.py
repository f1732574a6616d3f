"""Which rank works on which unit: the same answer on all ranks, from shapes alone.

A *unit* is what one rank needs as a whole: a matrix that Muon orthogonalizes, or a parameter. One
that lies on one rank as a whole, as an expert may, stays there, unless that rank has more than its
share of all work. The others are dealt with the most expensive one first, each to the rank that
would be done with it first.

    4 units of cost 4 3 3 2 on 2 ranks:        rank 0: 4 2        rank 1: 3 3

Then every rank's units are cut into *rounds*, so that the messages of one round can travel while
another round is computed, and so that only some units are in memory as a whole.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.base.portions import portions
from shardwise.sharding.part import Part, Span, shape_of

#: What moving one element to its owner and back costs, in floating-point operations.
MOVE = 1000
#: Bytes of whole units that one rank works on in a round, unless a single one is larger.
ROUND_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class UnitPart:
    """What one rank holds of a unit.

    Attributes:
        at: index of the unit in the leading dimensions of that rank's shard.
        spans: of indices of the whole unit, for each of its dimensions.
    """

    at: tuple[int, ...]
    spans: Part

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return shape_of(self.spans)

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Unit:
    """What one rank works on as a whole: a parameter, or one of a stack of matrices.

    Attributes:
        param: number of the parameter.
        index: of the unit in the leading dimensions of the parameter.
        shape: of the unit.
        pieces: what each rank holds of it, by rank; ranks that hold nothing are missing.
    """

    param: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: Mapping[int, UnitPart]

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def homes(self) -> list[int]:
        """The ranks that hold all of it."""
        return [rank for rank, piece in self.pieces.items() if piece.numel == self.numel]

    def sources(self, owner: int) -> dict[int, UnitPart]:
        """Return the pieces that make up the whole, by the rank that sends each to the owner.

        Of the ranks that hold the same piece the owner itself sends it, or the nearest one.
        """
        nearest: dict[Part, int] = {}
        for rank in sorted(self.pieces, key=lambda rank: (abs(rank - owner), rank)):
            nearest.setdefault(self.pieces[rank].spans, rank)
        return {rank: self.pieces[rank] for rank in sorted(nearest.values())}


#: The units of each rank.
Dealt = tuple[tuple[Unit, ...], ...]


def units_of(
    param: int, shape: Sequence[int], parts: Mapping[int, Part], dims: int
) -> Iterator[Unit]:
    """Yield the units of a parameter: one, or those of a stack.

    Args:
        param: number of the parameter.
        shape: of the full parameter.
        parts: what each rank holds of it.
        dims: how many of the last dimensions a unit has: two of a matrix.
    """
    stacked = len(shape) - dims
    kept = {
        rank: ([_indices(spans) for spans in part[:stacked]], part[stacked:])
        for rank, part in parts.items()
        if math.prod(shape_of(part[stacked:]))
    }
    for index in itertools.product(*map(range, shape[:stacked])):
        pieces = {
            rank: UnitPart(tuple(held[i] for held, i in zip(inside, index, strict=True)), spans)
            for rank, (inside, spans) in kept.items()
            if all(i in held for held, i in zip(inside, index, strict=True))
        }
        if pieces:
            yield Unit(param, index, tuple(shape[stacked:]), pieces)


def deal(
    units: Sequence[Unit], ranks: int, cost: Callable[[Unit], int], loads: Sequence[int] = ()
) -> Dealt:
    """Deal units out to ranks.

    Args:
        units: all of them, in the same order on every rank.
        ranks: the number of ranks.
        cost: returns the floating-point operations of a unit.
        loads: those that each rank has to do besides.

    Returns:
        The units of each rank.
    """
    own: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = list(loads) or [0] * ranks
    share = (sum(loads) + sum(map(cost, units))) / ranks
    left = []
    for unit in sorted(units, key=cost, reverse=True):  # equal ones keep their order
        home = min(unit.homes, key=lambda rank: (loads[rank], rank), default=None)
        if home is None or loads[home] + cost(unit) > share:
            left.append(unit)
        else:
            own[home].append(unit)
            loads[home] += cost(unit)
    queue = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(queue)
    for unit in left:
        load, owner = queue[0]
        own[owner].append(unit)
        moved = 0 if owner in unit.homes else MOVE * unit.numel
        heapq.heapreplace(queue, (load + cost(unit) + moved, owner))
    return tuple(map(tuple, own))


def rounds(dealt: Dealt, nbytes: Callable[[Unit], int], limit: int = ROUND_BYTES) -> list[Dealt]:
    """Cut what each rank has to do into rounds.

    Args:
        dealt: the units of each rank.
        nbytes: returns the bytes of a whole unit.
        limit: the bytes of one rank in one round; a larger unit has a round to itself.

    Returns:
        The units of each rank in each round; ranks that are done have none.
    """
    by_rank = [map(tuple, portions(own, nbytes, limit)) for own in dealt]
    return [tuple(each) for each in itertools.zip_longest(*by_rank, fillvalue=())]


def _indices(spans: Sequence[Span]) -> dict[int, int]:
    """Where in its shard a rank holds each index of a dimension."""
    held = itertools.chain.from_iterable(range(first, first + n) for first, n in spans)
    return {index: at for at, index in enumerate(held)}
