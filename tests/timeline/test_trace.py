"""The trace: what the format of Chrome's trace events asks for."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from shardwise.base.observe import Activity, Memory
from shardwise.base.spans import Span, StepTime
from shardwise.timeline.page import nested, trace
from shardwise.timeline.rank import MemoryChange, RankTimeline, Step
from shardwise.timeline.steps import Timeline
from tests.timeline.ranks import collective, rank, span, wait

PREDICTION = StepTime(
    seconds=9.0,
    compute=6.0,
    exposed=1.0,
    optimizer=1.0,
    host=1.0,
    tokens_per_second=100.0,
    mfu=0.5,
    bound_by="matrix products",
    spans=(
        Span(Activity.FORWARD, "layers.0", 0.0, 2.0),
        Span(Activity.ALL_GATHER, "layers.0", 0.0, 1.0, "dp"),
        Span(Activity.BACKWARD, "layers.0", 3.0, 7.0),
    ),
)


def check_format(found: Any) -> None:
    """Check a trace by "Trace Event Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQ).

    Slices of one thread have to be nested, as Perfetto asks for beyond that.
    """
    found = json.loads(json.dumps(found, allow_nan=False))
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in found["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                begin = round(1e3 * event["ts"])  # in nanoseconds, as Perfetto counts
                end = begin + round(1e3 * event["dur"])
                threads[event["pid"], event["tid"]].append((begin, end))
            case "M":
                assert event["name"].partition("_")[0] in ("process", "thread")
                assert event["args"]
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "I":
                assert event["s"] == "p"
            case other:
                pytest.fail(f"an event of type {other}")
    for slices in threads.values():
        ends: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or end <= ends[-1], "slices of a thread overlap"
            ends.append(end)


def _rank() -> RankTimeline:
    spans = [
        span(Activity.BACKWARD, 1, 6, "the root group"),
        span(Activity.BACKWARD, 5, 8, "layers.0"),  # ends later than the root's
        *(collective(1, 4), collective(3, 7, "layers.1"), wait(4, 4.5)),
        span(Activity.PEER, 4.1, 4.2, "1"),
        span(Activity.REDUCE, 9, None),
    ]
    made = rank(0, spans, [Step(1, 0.0, 10.0), Step(2, 10.0, 20.0)])
    change = MemoryChange(2.0, Memory.GRADIENTS, "layers.0", 2**20)
    values = {f: getattr(made, f) for f in made.__dataclass_fields__}
    return RankTimeline(
        **{**values, "changes": (change,), "held": {Memory.PARAMETERS: 3 * 2**20}, "error": "lost"}
    )


def test_a_trace_has_the_format_that_viewers_read() -> None:
    check_format(trace(Timeline((_rank(), rank(1, [])))))
    check_format(trace(Timeline((_rank(),), PREDICTION)))
    check_format(trace(Timeline(())))


def test_ranks_are_processes_with_tracks_for_what_happens_at_once() -> None:
    events = trace(Timeline((_rank(),)))["traceEvents"]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert tracks == [
        *("steps", "groups", "groups", "host"),
        *("collectives over dp", "collectives over dp"),
    ]
    [process] = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert process == "rank 0 on here, cpu"
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert slices["step 1"]["ts"] == 1e6  # the recording began a second before
    assert slices["all-gather layers.0"]["args"]["bytes"] == 1000
    assert "wait for rank 1" in slices
    assert slices["reduce layers.0"]["args"] == {"unfinished": True}
    memory = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert memory == {"memory: parameters": {"MiB": 3.0}, "memory: gradients": {"MiB": 1.0}}
    assert [e["name"] for e in events if e["ph"] == "I"] == ["lost"]


def test_the_prediction_stands_beside_every_step() -> None:
    events = trace(Timeline((_rank(),), PREDICTION))["traceEvents"]
    found = [e["ts"] for e in events if e["pid"] == 1 and e.get("name") == "forward layers.0"]
    assert found == [1e6, 11e6]


def test_lanes_hold_what_is_nested_and_no_more_than_it_takes() -> None:
    def slices(*times: tuple[float, float]) -> list[tuple[float, float, str, dict[str, Any]]]:
        return [(begin, end, "", {}) for begin, end in times]

    assert nested(slices((0, 4), (1, 2), (4, 5))) == [slices((0, 4), (1, 2), (4, 5))]
    assert nested(slices((0, 2), (1, 3), (2, 4))) == [slices((0, 2), (2, 4)), slices((1, 3))]
    assert nested([]) == []
