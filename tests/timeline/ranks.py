"""Timelines of made-up ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.base.observe import Activity
from shardwise.base.spans import Span
from shardwise.timeline.rank import RankTimeline, Step


def span(activity: Activity, begin: float, end: float | None, name: str = "layers.0") -> Span:
    """Return a span of a group, in the first thread."""
    return Span(activity, name, begin, end)


def collective(
    begin: float,
    end: float,
    name: str = "layers.0",
    activity: Activity = Activity.ALL_GATHER,
    members: tuple[int, ...] = (0, 1),
) -> Span:
    """Return a collective over the dimension ``dp``."""
    return Span(
        activity,
        name,
        begin,
        end,
        dimension="dp",
        nbytes=1000,
        transport="gloo",
        launches=2,
        members=members,
    )


def wait(begin: float, end: float, name: str = "layers.0") -> Span:
    """Return a wait for a collective over the dimension ``dp``."""
    return Span(Activity.WAIT, name, begin, end, dimension="dp")


def rank(
    number: int, spans: Sequence[Span], steps: Sequence[Step] = (Step(1, 0.0, 10.0),), size: int = 2
) -> RankTimeline:
    """Return what a rank did."""
    return RankTimeline(
        rank=number,
        world_size=size,
        host="here",
        device="cpu",
        begin=-1.0,
        end=20.0,
        spans=tuple(sorted(spans, key=lambda each: each.begin)),
        steps=tuple(steps),
    )
