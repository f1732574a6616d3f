"""Curves of any length in a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

POINTS = 1000  # of a curve; more than pixels of a chart have no use
MOST_NAMES = 64  # a training has ten; a damaged file may have any number


class _Bucket:
    """What a few consecutive steps had of each value: sum, count, lowest, highest."""

    __slots__ = ("last", "values")

    def __init__(self, step: int) -> None:
        self.last = step
        self.values: dict[str, list[float]] = {}

    def add(self, name: str, value: float, count: float, low: float, high: float) -> None:
        known = self.values.get(name)
        if known is None:
            self.values[name] = [value, count, low, high]
        else:
            known[0] += value
            known[1] += count
            known[2] = min(known[2], low)
            known[3] = max(known[3], high)

    def point(self, name: str, part: str) -> float | None:
        """Return the mean, low or high of a value in six digits: more than a chart can show."""
        sums = self.values.get(name)
        if sums is None:
            return None
        total, count, low, high = sums
        value = {"mean": total / count, "low": low, "high": high}[part]
        return float(f"{value:.6g}") if math.isfinite(value) else None


class Curves:
    """Values over steps. Once there are too many points, neighbors become one.

    A point keeps the mean, the lowest and the highest value of its steps, so that a spike of a
    single step stays visible in a million of them.

    Args:
        points: how many points a curve has at most.
    """

    def __init__(self, points: int = POINTS) -> None:
        self._points = points
        self._width = 1  # steps of a bucket
        self._buckets: dict[int, _Bucket] = {}
        self._names: dict[str, None] = {}  # in the order in which they came

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add the values of a step; None and what is not finite is left out."""
        key = step // self._width
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = _Bucket(step)
        elif step > bucket.last:
            bucket.last = step
        known, names = bucket.values, self._names
        for name, value in values.items():
            if value is None or not -math.inf < value < math.inf:
                continue
            if name not in names:
                if len(names) == MOST_NAMES:
                    continue
                names[name] = None
            sums = known.get(name)
            if sums is None:
                known[name] = [float(value), 1, float(value), float(value)]
                continue
            sums[0] += value
            sums[1] += 1
            if value < sums[2]:
                sums[2] = float(value)
            elif value > sums[3]:
                sums[3] = float(value)
        if known and key not in self._buckets:
            self._buckets[key] = bucket
            while len(self._buckets) > self._points:
                self._halve()

    def _halve(self) -> None:
        before, self._buckets = self._buckets, {}
        self._width *= 2
        for bucket in before.values():
            wider = self._buckets.setdefault(bucket.last // self._width, _Bucket(bucket.last))
            wider.last = max(wider.last, bucket.last)
            for name, (value, count, low, high) in bucket.values.items():
                wider.add(name, value, count, low, high)

    def to_json(self) -> dict[str, Any]:
        """Return the points.

        Returns:
            ``steps``: the last step of each point, ascending; ``width``: steps of a point;
            ``values``: by name ``mean``, ``low`` and ``high``, each with a number or None for each
            point. With a width of 1 there are means only.
        """
        buckets = [self._buckets[key] for key in sorted(self._buckets)]
        parts = ("mean",) if self._width == 1 else ("mean", "low", "high")
        return {
            "steps": [bucket.last for bucket in buckets],
            "width": self._width,
            "values": {
                name: {part: [bucket.point(name, part) for bucket in buckets] for part in parts}
                for name in self._names
            },
        }
