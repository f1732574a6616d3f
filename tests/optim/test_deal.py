"""Which rank gets which matrix, and what each holds of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from shardwise.optim.deal import Unit, UnitPart, deal, rounds, units_of
from shardwise.sharding.part import full_part, placed


def _everywhere(count: int, ranks: int) -> list[Unit]:
    """Matrices of which every rank holds a row."""
    pieces = {rank: UnitPart((), (((rank, 1),), ((0, 1),))) for rank in range(ranks)}
    return [Unit(number, (), (ranks, 1), pieces) for number in range(count)]


def test_expensive_matrices_are_dealt_first() -> None:
    costs = [3, 2, 4, 3]
    dealt = deal(_everywhere(4, 2), 2, lambda matrix: 10**6 * costs[matrix.param])
    assert [[costs[matrix.param] for matrix in own] for own in dealt] == [[4, 2], [3, 3]]


@given(costs=st.lists(st.integers(1, 10**9), max_size=40), ranks=st.integers(1, 9))
def test_every_matrix_has_one_owner_and_no_rank_much_more_than_others(
    costs: list[int], ranks: int
) -> None:
    dealt = deal(_everywhere(len(costs), ranks), ranks, lambda matrix: costs[matrix.param])
    numbers = sorted(matrix.param for own in dealt for matrix in own)
    assert numbers == list(range(len(costs)))
    loads = [sum(costs[matrix.param] for matrix in own) for own in dealt]
    # What is moved counts as well: 1000 for each of the rows.
    assert max(loads) - min(loads) <= max(costs, default=0) + 1000 * ranks * len(costs)


def test_experts_stay_where_they_are_unless_others_have_nothing_to_do() -> None:
    def experts(count: int) -> list[Unit]:
        parts = {rank: placed((count, 8, 8), [Shard(0)], (4,), (rank,)) for rank in range(4)}
        return list(units_of(0, (count, 8, 8), parts, 2))

    at_home = deal(experts(8), 4, lambda matrix: 10**6)
    assert all(set(matrix.pieces) == {rank} for rank in range(4) for matrix in at_home[rank])
    uneven = deal(experts(6), 4, lambda matrix: 10**6)  # 2 2 2 0 of them lie on the ranks
    assert sorted(map(len, uneven)) == [1, 1, 2, 2]
    assert all(any(rank in each.homes for each in uneven[rank]) for rank in range(3))


@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6)),
    placements=st.lists(
        st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(2)]), min_size=2, max_size=2
    ),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    owner=st.integers(0, 8),
)
def test_pieces_make_up_every_matrix_exactly_once(
    shape: tuple[int, int, int],
    placements: list[Replicate | Shard],
    sizes: tuple[int, int],
    owner: int,
) -> None:
    coordinates = [(i, j) for i in range(sizes[0]) for j in range(sizes[1])]
    parts = {
        rank: placed(shape, placements, sizes, coordinate)
        for rank, coordinate in enumerate(coordinates)
    }
    found = list(units_of(0, shape, parts, 2))
    assert len(found) == shape[0]
    for matrix in found:
        covered = torch.zeros(matrix.shape, dtype=torch.int64)
        for piece in matrix.sources(owner % len(coordinates)).values():
            for row, height in piece.spans[0]:
                for column, width in piece.spans[1]:
                    covered[row : row + height, column : column + width] += 1
        assert covered.eq(1).all()


def test_the_owner_sends_its_own_piece_and_its_neighbors_send_theirs() -> None:
    """Replicas hold the same: ranks 0 and 2 the upper half, ranks 1 and 3 the lower one."""
    parts = {
        rank: placed((4, 4), [Replicate(), Shard(0)], (2, 2), (rank // 2, rank % 2))
        for rank in range(4)
    }
    (matrix,) = units_of(0, (4, 4), parts, 2)
    assert [sorted(matrix.sources(owner)) for owner in range(4)] == [[0, 1], [0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(("limit", "expected"), [(1, [1, 1, 1]), (2, [2, 1]), (100, [3])])
def test_rounds_are_bounded_unless_a_matrix_is_larger(limit: int, expected: list[int]) -> None:
    (matrix,) = units_of(0, (2, 2), {0: full_part((2, 2))}, 2)
    found = rounds(((matrix,) * 3, (matrix,)), lambda matrix: 1, limit)
    assert [len(first) for first, _ in found] == expected
    assert [len(second) for _, second in found] == [1, *[0] * (len(expected) - 1)]
    assert math.fsum(len(own) for each in found for own in each) == 4
