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
        for name, value in values.items():
            if value is None or not math.isfinite(value):
                continue
            if name not in self._names:
                if len(self._names) == MOST_NAMES:
                    continue
                self._names[name] = None
            bucket = self._bucket(step)
            bucket.add(name, float(value), 1, float(value), float(value))
        while len(self._buckets) > self._points:
            self._halve()

    def _bucket(self, step: int) -> _Bucket:
        bucket = self._buckets.setdefault(step // self._width, _Bucket(step))
        bucket.last = max(bucket.last, step)
        return bucket

    def _halve(self) -> None:
        before, self._buckets = self._buckets, {}
        self._width *= 2
        for bucket in before.values():
            wider = self._bucket(bucket.last)
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
        parts = {"mean": _mean} if self._width == 1 else {"mean": _mean, "low": _low, "high": _high}
        return {
            "steps": [bucket.last for bucket in buckets],
            "width": self._width,
            "values": {
                name: {
                    part: [_brief(of(bucket.values.get(name))) for bucket in buckets]
                    for part, of in parts.items()
                }
                for name in self._names
            },
        }


def _mean(sums: list[float] | None) -> float | None:
    return None if sums is None else sums[0] / sums[1]


def _low(sums: list[float] | None) -> float | None:
    return None if sums is None else sums[2]


def _high(sums: list[float] | None) -> float | None:
    return None if sums is None else sums[3]


def _brief(value: float | None) -> float | None:
    """Six digits: more than a chart can show."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
