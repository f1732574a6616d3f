"""An order of numbers that puts NaN last: never the smallest, and the largest of all."""

from __future__ import annotations

import math


def nan_last(value: float) -> tuple[bool, float]:
    """A key for ``max``, ``min`` and ``sorted``, which by themselves pass over NaN or do not."""
    return math.isnan(value), value
