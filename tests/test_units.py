"""Sizes and durations as people read them."""

from __future__ import annotations

import pytest

from shardwise.base.units import binary_size, seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 2**20, "15.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**40 * 1500, "1,500.0 TiB"),
    ],
)
def test_sizes_have_binary_units(nbytes: int, text: str) -> None:
    assert binary_size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.234, "1.23 s"),
        (75.1, "75.1 s"),
        (0.0456, "45.6 ms"),
        (0.000789, "789 µs"),
        (0, "0 s"),
    ],
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text
