"""Ranks, shapes and spans are shortened without becoming ambiguous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.inspect.tiling import Block, Span
from shardwise.inspect.words import (
    block_in_words,
    counted,
    dimension_name,
    holders_in_words,
    ranks_in_words,
    shape_in_words,
    spans_in_words,
)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 1, 2, 8], "0-2, 8"),
        ([0, 2, 4, 6], "0, 2, 4, 6"),
        (list(range(0, 64, 8)), "0, 8 .. 56"),
        ([r for r in range(64) if r % 16 < 4], "0-3, 16-19, 32-35, 48-51"),
        ([r for r in range(128) if r % 16 < 4], "0-3, 16-19 .. 112-115"),
        ([0, 2, 4, 7, 11, 12], "0, 2, 4, 7, ... (6 ranks)"),
        ([], ""),
    ],
)
def test_ranks(ranks: list[int], expected: str) -> None:
    assert ranks_in_words(ranks) == expected


@given(st.sets(st.integers(0, 30), min_size=1, max_size=4))
def test_few_ranks_are_all_named(ranks: set[int]) -> None:
    found: set[int] = set()
    for part in ranks_in_words(sorted(ranks)).split(", "):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    assert found == ranks


def test_holders_are_one_rank_or_several() -> None:
    assert holders_in_words([3]) == "rank 3"
    assert holders_in_words([0, 1]) == "ranks 0-1"


def test_shapes() -> None:
    assert shape_in_words((1024, 256)) == "1024x256"
    assert shape_in_words(()) == "scalar"


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], "none"),
        ([(0, 10)], "all"),
        ([(0, 4)], "0..3"),
        ([(9, 1)], "9"),
        ([(0, 2), (5, 2)], "0..1, 5..6"),
        ([(0, 1), (2, 1), (4, 1), (6, 1)], "0, 2, 4, ..."),
    ],
)
def test_spans(spans: list[Span], expected: str) -> None:
    assert spans_in_words(spans, 10) == expected


def test_blocks() -> None:
    assert block_in_words(Block((((0, 64),), ((0, 3),)), (0,)), (128, 3)) == (
        "rows 0..63, all columns"
    )
    assert block_in_words(Block((((1, 1),), ((0, 2),), ((0, 5),)), (0,)), (2, 4, 5)) == (
        "rows 1, columns 0..1, all dim 2"
    )
    assert block_in_words(Block(((), ((0, 3),)), (0,)), (128, 3)) == "nothing"
    assert block_in_words(Block((), (0,)), ()) == "the scalar"


def test_counts_and_dimensions() -> None:
    assert counted(1, "rank") == "1 rank"
    assert counted([1] * 1200, "rank") == "1,200 ranks"
    assert [dimension_name(dim) for dim in range(3)] == ["rows", "columns", "dim 2"]
