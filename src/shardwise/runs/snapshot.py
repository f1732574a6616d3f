"""What the folder of a run says at one moment, as plain values for a page.

A run may be under way, killed, of an older version, or damaged. So no file and no field is
required: what cannot be read is left out, and named among the problems. Texts may be hostile;
:mod:`shardwise.runs.page` never makes them part of its markup.
"""

from __future__ import annotations

import base64
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shardwise.base.errors import CheckpointError
from shardwise.base.files import read_small
from shardwise.base.strict import parse
from shardwise.checkpoint.disk.commit import is_complete, step_folder
from shardwise.runs.files import Lock, RunFiles, lock_of
from shardwise.runs.metrics import MOST_BYTES, Follower, RanksReader, parse_line

T = TypeVar("T")

POINTS = 1000  # of a curve; more than pixels of a chart have no use
MOST_NAMES = 64  # a training has ten; a damaged file may have any number


class _StepBucket:
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
        self._buckets: dict[int, _StepBucket] = {}
        self._names: dict[str, None] = {}  # in the order in which they came
        self._not_finite: dict[str, list[int]] = {}  # how many steps, and the first one

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add the values of a step. None, or what is not finite, is a gap that is counted."""
        key = step // self._width
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = _StepBucket(step)
        elif step > bucket.last:
            bucket.last = step
        names = self._names
        for name, value in values.items():
            if value is None or not -math.inf < value < math.inf:
                if name in self._not_finite or len(self._not_finite) < MOST_NAMES:
                    self._not_finite.setdefault(name, [0, step])[0] += 1
                continue
            if name in names or len(names) < MOST_NAMES:
                names[name] = None
                bucket.add(name, float(value), 1, float(value), float(value))
        if bucket.values and key not in self._buckets:
            self._buckets[key] = bucket
            while len(self._buckets) > self._points:
                self._halve()

    def _halve(self) -> None:
        before, self._buckets = self._buckets, {}
        self._width *= 2
        for bucket in before.values():
            wider = self._buckets.setdefault(bucket.last // self._width, _StepBucket(bucket.last))
            wider.last = max(wider.last, bucket.last)
            for name, (value, count, low, high) in bucket.values.items():
                wider.add(name, value, count, low, high)

    def to_json(self) -> dict[str, Any]:
        """Return the points.

        Returns:
            ``steps``: the last step of each point, ascending; ``width``: steps of a point;
            ``values``: by name ``mean``, ``low`` and ``high``, each with a number or None for each
            point. With a width of 1 there are means only; ``not_finite``: by name, in how many
            steps the value was NaN or infinite, and the first of them.
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
            "not_finite": self._not_finite,
        }


#: Seconds without a new line after which a run that cannot be seen to hold its lock has ended.
SILENCE = 120.0
#: Values that are no curves: the time that is left, and how far the data are.
NO_CURVES = frozenset({"step", "eta_s", "epoch"})

_MOST_LATEST = MOST_NAMES + len(NO_CURVES)  # values of the newest line
_MOST_RECORD = 1 << 24  # bytes of a run.json to show: thousands of sessions
_MOST_TEXT = 1 << 16  # bytes of a text to show
_MOST_IMAGE = 1 << 20
_MOST_PAGE = 1 << 22  # bytes of a page within the page
_MOST_PLAN = 1 << 24
_MOST_ROWS = 200  # sessions and checkpoints, the newest ones
_STEP_NAME = re.compile(r"step-(\d{8,18})", re.ASCII)


class RunReader:
    """Reads one run, again and again while it trains.

    Args:
        root: the folder of the run.
        at_once: bytes of steps after which one reading ends; the next one goes on.
    """

    def __init__(self, root: Path, at_once: int = MOST_BYTES) -> None:
        self.files = RunFiles(root)
        self._curves = Curves()
        self._latest: dict[str, Any] = {}
        self._damaged = 0
        self._first_damaged = 0
        self._follower = Follower(self.files.metrics, self._begin, self._line, at_once)
        self._ranks = RanksReader(self.files.ranks, at_once)
        self._sizes: dict[Path, tuple[int, dict[str, Any] | None]] = {}

    def _begin(self) -> None:
        self._curves = Curves()
        self._latest = {}
        self._damaged = 0

    def _line(self, line: bytes, number: int) -> None:
        try:
            record = parse_line(line, "")
        except CheckpointError:
            self._first_damaged = self._first_damaged if self._damaged else number
            self._damaged += 1
            return
        latest = self._latest
        for name, value in record.items():
            if name in latest or len(latest) < _MOST_LATEST:
                latest[name] = value
        step = record["step"]
        for name in NO_CURVES:
            record.pop(name, None)
        self._curves.add(step, record)

    def read(self) -> dict[str, Any]:
        """Return what the folder says now; the same until something in it changes."""
        problems: list[str] = []
        if not self.files.root.is_dir():
            problems.append(f"{self.files.root}: there is no such folder any more")
        try:
            self._follower.read()
        except CheckpointError as error:
            problems.append(str(error))
        if self._follower.left:
            problems.append(
                f"{self.files.metrics.name}: {self._follower.left:,} bytes are still to be read"
            )
        if self._damaged:
            problems.append(
                f"{self.files.metrics.name}: left out {self._damaged:,} damaged lines, of which "
                f"the first is line {self._first_damaged:,}"
            )
        ranks: list[dict[str, Any]] = []
        try:
            ranks = self._ranks.read()
        except CheckpointError as error:
            problems.append(str(error))
        record = self._object(self.files.run_json, _MOST_RECORD, problems)
        sessions = [each for each in _as(list, record.get("sessions")) if isinstance(each, dict)]
        config = _as(dict, record.get("config"))
        model = _as(dict, record.get("model"))
        return {
            "name": os.path.basename(os.path.realpath(self.files.root)),  # also of a link to itself
            "folder": str(self.files.root),
            "recipe": _as(str, record.get("recipe")),
            "model": _as(str, model.get("name")),
            "parameters": _number(model.get("parameters")),
            "data": _as(str, _as(dict, record.get("data")).get("summary")),
            "state": self._state(sessions),
            "sessions": sessions[-_MOST_ROWS:],
            "curves": self._curves.to_json(),
            "latest": dict(self._latest),
            "config": dict(_flat("", config)),
            "options": self._text(self.files.options, problems),
            "ranks": ranks,
            "frames": self._frames(problems),
            "checkpoints": self._checkpoints(_as(dict, record.get("best")).get("step")),
            "samples": self._samples(problems),
            "images": self._images(problems),
            "plan": self._object(self.files.plan, _MOST_PLAN, problems),
            "problems": problems,
        }

    def _state(self, sessions: list[dict[str, Any]]) -> str:
        """Return ``running``, ``finished``, ``stopped``, ``failed``, ``lost`` or ``unknown``."""
        status = _as(str, sessions[-1].get("status")) if sessions else ""
        if status in ("finished", "stopped", "failed"):
            return status
        lock = lock_of(self.files.lock)
        if lock is Lock.HELD:
            return "running"
        if status == "running":
            return "lost" if lock is Lock.FREE or not self._is_recent() else "running"
        return "unknown"

    def _is_recent(self) -> bool:
        """Return whether a step was recorded just now: locks may not be seen from another host."""
        for path in (self.files.metrics, self.files.run_json):
            try:
                if time.time() - path.stat().st_mtime < SILENCE:
                    return True
            except OSError:
                continue
        return False

    def _bytes(self, path: Path, most: int, problems: list[str]) -> bytes | None:
        if not os.path.lexists(path):
            return None
        try:
            return read_small(path, most)
        except CheckpointError as error:
            problems.append(str(error))
            return None

    def _object(self, path: Path, most: int, problems: list[str]) -> dict[str, Any]:
        found = self._bytes(path, most, problems)
        try:
            return {} if found is None else _as(dict, parse(found, str(path)))
        except CheckpointError as error:
            problems.append(str(error))
            return {}

    def _text(self, path: Path, problems: list[str], most: int = _MOST_TEXT) -> str:
        found = self._bytes(path, most, problems)
        return "" if found is None else found.decode("utf-8", errors="replace")

    def _samples(self, problems: list[str]) -> list[dict[str, str]]:
        text = self._text(self.files.sample, problems)
        return [{"name": self.files.sample.name, "text": text}] if text else []

    def _frames(self, problems: list[str]) -> list[dict[str, str]]:
        """Return the pages that are shown within the page."""
        timeline = self.files.timeline / "timeline.html"
        pages = {"Who holds what": self.files.layout, "Timeline": timeline}
        texts = {title: self._text(path, problems, _MOST_PAGE) for title, path in pages.items()}
        return [{"title": title, "html": text} for title, text in texts.items() if text]

    def _images(self, problems: list[str]) -> list[dict[str, str]]:
        image = self._bytes(self.files.confusion, _MOST_IMAGE, problems)
        if image is None:
            return []
        return [
            {"name": self.files.confusion.name, "data": base64.b64encode(image).decode("ascii")}
        ]

    def _checkpoints(self, best: object) -> list[dict[str, Any]]:
        """Return the checkpoints that are complete, the newest first."""
        folder = self.files.checkpoints
        try:
            names = [each.name for each in os.scandir(folder)]
        except OSError:
            return []
        steps = sorted(
            (int(m[1]) for name in names if (m := _STEP_NAME.fullmatch(name))), reverse=True
        )
        found = []
        for step in steps[:_MOST_ROWS]:
            about = self._checkpoint(step_folder(folder, step))
            if about is not None:
                found.append({"step": step, "best": step == best, **about})
        return found

    def _checkpoint(self, path: Path) -> dict[str, Any] | None:
        """Return bytes and time of a checkpoint; looked at once, since it never changes.

        A training may delete it meanwhile.
        """
        try:
            changed = path.stat().st_mtime_ns
            known = self._sizes.get(path)
            if known is None or known[0] != changed:
                about = None
                if is_complete(path):
                    with os.scandir(path) as entries:
                        sizes = [each.stat(follow_symlinks=False).st_size for each in entries]
                    about = {"bytes": sum(sizes), "files": len(sizes), "written": changed / 1e9}
                known = self._sizes[path] = (changed, about)
        except OSError:
            return None
        return known[1]


def _as(kind: type[T], value: object) -> T:
    """Return a value if it is of a kind, else an empty one."""
    return value if isinstance(value, kind) else kind()


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings by their names in full: ``train.optimizer.lr``."""
    for name, each in value.items():
        if isinstance(each, dict):
            yield from _flat(f"{prefix}{name}.", each)
        else:
            yield f"{prefix}{name}", each
