"""Rows hold every document once, none too much, and waste little."""

from __future__ import annotations

import random

import pytest

from shardwise.app.recipes.text.config import Packing
from shardwise.app.recipes.text.conversations import lay_out


@pytest.mark.parametrize("seed", range(20))
def test_every_document_is_in_one_row_and_rows_are_not_overfull(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(1, 60)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 200))]
    rows = lay_out(lengths, capacity, Packing.PACKED)
    held = [list(rows[number]) for number in range(len(rows))]
    assert sorted(document for row in held for document in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in row) <= capacity for row in held)
    # Any two rows together are more than one: else the second would not have been begun.
    totals = sorted(sum(lengths[each] for each in row) for row in held)
    assert len(totals) < 2 or totals[0] + totals[1] > capacity


def test_packing_fills_rows_as_well_as_best_fit_does() -> None:
    assert len(lay_out([6, 5, 4, 3, 2], 10, Packing.PACKED)) == 2, "6 + 4 and 5 + 3 + 2"
    # 7 leaves 3 and 6 leaves 4: the 3 goes where it fits best, and so the 4 still fits.
    rows = lay_out([6, 3, 4, 7], 10, Packing.PACKED)
    assert sorted(sorted(rows[row]) for row in range(len(rows))) == [[0, 2], [1, 3]]


def test_padded_rows_hold_one_document_each_in_order() -> None:
    rows = lay_out([3, 1, 5], 8, Packing.PADDED)
    assert [list(rows[row]) for row in range(len(rows))] == [[0], [1], [2]]
