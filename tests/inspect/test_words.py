"""Ranks, shapes and names are shortened without becoming ambiguous."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from shardwise.base.units import counted
from shardwise.insight.inspect.grid import Block
from shardwise.insight.inspect.words import (
    Row,
    add_rows,
    block_in_words,
    dimension_name,
    fold,
    holders_in_words,
    ranks_in_words,
    shape_in_words,
    spans_in_words,
)
from shardwise.sharding.part import Span


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


def folded(*names: str) -> list[str]:
    return [row.full_name for row in fold(names, name=str, kind=lambda name: None)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.weight", "b.weight"], ["a.weight", "b.weight"]),
        (["l.0.w", "l.1.w", "l.2.w"], ["l.0..2.w"]),
        (["l.0.w", "l.1.w"], ["l.0..1.w"]),
        (["l.0.w", "l.5.w"], ["l.0,5.w"]),
        (["l.1.w", "l.3.w", "l.5.w", "l.7.w"], ["l.1,3..7.w"]),
        (["l.2.w", "l.0.w", "l.1.w"], ["l.0..2.w"]),
        (["l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w"], ["l.0..1.e.0..1.w"]),
        (["0.w", "1.w"], ["0..1.w"]),
        (["l.0", "l.1"], ["l.0..1"]),
        (["conv1.w", "conv2.w"], ["conv1.w", "conv2.w"]),
    ],
)
def test_numbers_become_ranges(names: list[str], expected: list[str]) -> None:
    assert folded(*names) == expected


def test_numbers_that_form_no_product_stay_apart() -> None:
    """``0..1.e.0..1`` would name a member that does not exist."""
    assert folded("0.e.0", "0.e.1", "1.e.0") == ["0.e.0", "0.e.1", "1.e.0"]


def test_only_items_of_one_kind_are_folded() -> None:
    sizes = {"l.0.w": 4, "l.1.w": 4, "l.2.w": 8, "l.3.w": 4}
    rows = fold(sizes, name=str, kind=sizes.__getitem__)
    assert [row.full_name for row in rows] == ["l.0,1,3.w", "l.2.w"]
    assert rows[0].members == ("l.0.w", "l.1.w", "l.3.w")


def test_rows_keep_the_order_of_their_first_members() -> None:
    assert folded("z", "l.0.b", "l.0.a", "l.1.a", "l.1.b", "c") == [
        "z",
        "l.0..1.b",
        "l.0..1.a",
        "c",
    ]


def test_the_prefix_ends_with_the_last_number() -> None:
    (row,) = fold(["m.l.0.up.w", "m.l.1.up.w"], name=str, kind=lambda name: None)
    assert (row.prefix, row.name, row.first) == ("m.l.0..1", "up.w", "m.l.0.up.w")
    (row,) = fold(["norm.w"], name=str, kind=lambda name: None)
    assert (row.prefix, row.name) == ("", "norm.w")


def _expanded(name: str) -> set[str]:
    """All names that a folded one stands for."""
    text = re.sub(r"(\d+)\.\.(\d+)", r"\1-\2", name)
    choices = []
    for part in text.split("."):
        numbers: list[str] = []
        for piece in part.split(","):
            first, _, last = piece.partition("-")
            numbers += map(str, range(int(first), int(last or first) + 1))
        choices.append(numbers)
    return {".".join(each) for each in itertools.product(*choices)}


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_ranges_name_every_member_and_nothing_else(numbers: set[tuple[int, int]]) -> None:
    names = sorted(f"{a}.{b}" for a, b in numbers)
    rows = fold(names, name=str, kind=lambda name: None)
    assert sorted(member for row in rows for member in row.members) == names
    for row in rows:
        if not re.search(r"\d,\d+\.\.", row.full_name):  # such as 0,2..4: every second number
            assert _expanded(row.full_name) == set(row.members)


def test_a_table_has_one_line_for_the_prefix() -> None:
    table = Table("name", "size", box=None, pad_edge=False)
    names = ["top", "l.0.a", "l.0.b", "l.1.a", "l.1.b", "odd.7.a"]
    rows: list[Row[str]] = fold(names, name=str, kind=lambda name: None)
    add_rows(table, rows, lambda row: [str(len(row.first))])
    out = io.StringIO()
    Console(file=out, width=40, color_system=None).print(table)
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["name", "size"],
        ["top", "3"],
        ["l.0..1", "(2", "alike)"],
        ["a", "5"],
        ["b", "5"],
        ["odd.7"],
        ["a", "7"],
    ]
