"""Portions: all items in their order, and no more at a time than are asked for."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.base.portions import portions


@given(st.lists(st.integers(0, 9)), st.integers(0, 20))
def test_nothing_is_lost_and_only_a_larger_item_exceeds_the_limit(
    sizes: list[int], most: int
) -> None:
    found = list(portions(sizes, int, most))
    assert [size for portion in found for size in portion] == sizes
    assert all(portion and (sum(portion) <= most or len(portion) == 1) for portion in found)
    for portion, following in itertools.pairwise(found):
        assert sum(portion) + following[0] > most
