"""The timeline of all ranks: a value, and what is said about it in a line."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.base import units
from shardwise.base.observe import Activity
from shardwise.checkpoint.disk.strict import Fields, refuse
from shardwise.insight.planning.clock import StepTime
from shardwise.insight.planning.events import Span
from shardwise.insight.timeline.rank import RankTimeline, time_of
from shardwise.insight.timeline.steps import Part, StepOfAll, steps_of, typical

_FORMAT = "shardwise timeline 1"


@dataclass(frozen=True)
class Timeline:
    """What ranks did while they were recorded.

    Attributes:
        ranks: the ranks whose recordings are known, in order.
        prediction: what a plan said that a step takes, if there is one.
    """

    ranks: tuple[RankTimeline, ...]
    prediction: StepTime | None = None

    @cached_property
    def steps(self) -> list[StepOfAll]:
        """What the time of each step went into."""
        return steps_of(self.ranks)

    @property
    def typical(self) -> StepOfAll | None:
        """The step of median length; ``None`` if no step was recorded."""
        return typical(self.steps) if self.steps else None

    @property
    def missing(self) -> list[int]:
        """The ranks of which nothing is known."""
        known = {rank.rank for rank in self.ranks}
        size = max((rank.world_size for rank in self.ranks), default=0)
        return [rank for rank in range(size) if rank not in known]

    def summary(self) -> str:
        """Return the typical step in one line."""
        step = self.typical
        if step is None:
            return "no step was recorded"
        waiting = step.part(Part.WAIT)
        words = [
            f"a step takes {units.seconds(step.seconds)}",
            f"{_share(waiting, step)} of it waiting",
        ]
        if len(step.ranks) > 1:
            waited = step.waited_for(slow := step.slowest)
            words.append(
                f"rank {slow} is the slowest: others wait {units.seconds(waited)} for it"
                if waited > 0
                else f"rank {slow} is the slowest"
            )
        if self.prediction is not None:
            words.append(f"{units.seconds(self.prediction.seconds)} were predicted")
        return ", ".join(words)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        predicted = self.prediction
        return {
            "format": _FORMAT,
            "ranks": [rank.to_json() for rank in self.ranks],
            "prediction": None if predicted is None else prediction_to_json(predicted),
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> Timeline:
        """Read what :meth:`to_json` returned.

        Raises:
            CheckpointError: it is something else; the message names the file.
        """
        fields = Fields(value, where)
        if fields.text("format") != _FORMAT:
            refuse(where, f"the format {value['format']!r}", _FORMAT)
        ranks = [RankTimeline.from_json(each, where) for each in fields.items("ranks", 1 << 20)]
        predicted = value.get("prediction")
        return cls(
            tuple(sorted(ranks, key=lambda rank: rank.rank)),
            None if predicted is None else prediction_from_json(predicted, where),
        )


def together(timelines: Iterable[Timeline]) -> Timeline:
    """Put timelines of different ranks together."""
    known: dict[int, RankTimeline] = {}
    prediction: StepTime | None = None
    for each in timelines:
        known |= {rank.rank: rank for rank in each.ranks}
        prediction = prediction or each.prediction
    return Timeline(tuple(known[rank] for rank in sorted(known)), prediction)


def packed(rank: RankTimeline) -> bytes:
    """Return a rank's part for another rank, compressed."""
    return zlib.compress(json.dumps(rank.to_json()).encode(), 1)


def unpacked(content: bytes, rank: int) -> RankTimeline:
    """Return what :func:`packed` packed, on the rank ``rank``."""
    return RankTimeline.from_json(json.loads(zlib.decompress(content)), f"rank {rank}")


def prediction_to_json(predicted: StepTime) -> dict[str, Any]:
    """Return a prediction as plain values."""
    parts = ("seconds", "compute", "exposed", "optimizer", "host", "tokens_per_second", "mfu")
    return {
        **{name: getattr(predicted, name) for name in (*parts, "bound_by")},
        "spans": [[s.activity.value, s.name, s.dimension, s.begin, s.end] for s in predicted.spans],
    }


def prediction_from_json(value: Any, where: str) -> StepTime:
    """Read what :func:`prediction_to_json` returned.

    Raises:
        CheckpointError: it is something else; the message names the file.
    """
    try:
        spans = [
            Span(Activity(activity), str(name), time_of(begin), time_of(end), str(dimension))
            for activity, name, dimension, begin, end in value["spans"]
        ]
        numbers: dict[str, Any] = {
            name: None if each is None and name == "mfu" else time_of(each)
            for name, each in value.items()
            if name not in ("spans", "bound_by")
        }
        return StepTime(**numbers, bound_by=str(value["bound_by"]), spans=tuple(spans))
    except (KeyError, TypeError, ValueError, AttributeError):
        refuse(f"{where}, 'prediction'", "other values", "what a recording writes")


def _share(seconds: float, step: StepOfAll) -> str:
    return f"{100 * seconds / step.seconds:.0f} %" if step.seconds else "0 %"
