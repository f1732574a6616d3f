"""The timeline as a trace for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

The format is Chrome's "Trace Event Format", in JSON: Perfetto reads it, and anything can write it.
(The package ``perfetto`` writes protobuf, and needs protobuf; viztracer traces Python functions.)

A rank is a process of the trace, and what it does at once lies on several tracks of it: steps;
groups; each thread of the host; the device; each mesh dimension's collectives; its memory by kind.
Slices of one track have to be nested, so what overlaps is put on further tracks of the same name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.base.observe import Activity
from shardwise.insight.planning.events import Span
from shardwise.insight.timeline.merged import Timeline
from shardwise.insight.timeline.rank import COLLECTIVES, RankTimeline

_COMPUTES = frozenset({Activity.FORWARD, Activity.BACKWARD})

#: Names of colors that trace viewers know.
_COLORS = {
    Activity.FORWARD: "thread_state_running",
    Activity.BACKWARD: "rail_response",
    Activity.OPTIMIZER: "rail_animation",
    Activity.WAIT: "terrible",
    Activity.PEER: "bad",
}

_Slice = tuple[float, float, str, dict[str, Any]]  # begin, end, name, more


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as plain values for JSON. Times are in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in timeline.ranks:
        events += _of_rank(rank)
    if timeline.prediction is not None and timeline.ranks:
        events += _of_prediction(timeline)
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:  # viewers do not show what is before 0
            event["ts"] = round(event["ts"] - first, 3)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"source": "shardwise.timeline", "summary": timeline.summary()},
    }


def _of_rank(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    tracks: dict[str, list[_Slice]] = defaultdict(list)
    tracks["steps"] = [(s.begin, s.end, f"step {s.number}", {}) for s in rank.steps]
    for span in rank.spans:
        end = rank.end if span.end is None else span.end
        tracks[_track(span)].append((span.begin, end, _title(span), _more(span)))
        if span.device is not None:
            tracks["device"].append((*span.device, _title(span), _more(span)))
    title = f"rank {rank.rank} on {rank.host}, {rank.device}"
    yield from _process(rank.rank, title, rank.rank, tracks)
    yield from _memory(rank)
    if rank.error:
        yield {
            "ph": "I",
            "s": "p",
            "pid": rank.rank,
            "tid": 1,
            "ts": _us(rank.end),
            "name": rank.error,
        }


def _track(span: Span) -> str:
    if span.activity in COLLECTIVES:
        return f"collectives over {span.dimension or 'ranks'}"
    if span.activity in _COMPUTES:
        return "groups"
    return "host" if span.thread == 0 else f"host, thread {span.thread}"


def _title(span: Span) -> str:
    if span.activity is Activity.PEER:
        return f"wait for rank {span.name}"
    return f"{span.activity.value} {span.name}".rstrip()


def _more(span: Span) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.dimension:
        args["dimension"] = span.dimension
    if span.activity in COLLECTIVES:
        args |= {"bytes": span.nbytes, "launches": span.launches, "transport": span.transport}
        if span.seconds > 0:
            args["GB/s"] = round(span.nbytes / span.seconds / 1e9, 3)
    if span.end is None:
        args["unfinished"] = True
    more: dict[str, Any] = {"cat": span.activity.value}
    if span.activity in _COLORS:
        more["cname"] = _COLORS[span.activity]
    return {**more, "args": args} if args else more


def _laid_out(tracks: dict[str, list[_Slice]]) -> Iterator[tuple[str, list[_Slice]]]:
    """Return tracks whose slices are nested, in the order in which they are to be shown."""
    order = ("steps", "groups", "device", "host")

    def place(name: str) -> tuple[int, str]:
        return (order.index(name) if name in order else len(order)), name

    for name in sorted(tracks, key=place):
        for lane in nested(tracks[name]):
            yield name, lane


def nested(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Divide slices into lanes, in each of which any two are apart or one is inside the other."""
    lanes: list[list[_Slice]] = []
    open_in: list[
        list[float]
    ] = []  # by lane, the ends of the slices that are open, outermost first
    for each in sorted(slices, key=lambda s: (s[0], -s[1])):
        begin, end = each[:2]
        for lane, ends in zip(lanes, open_in, strict=True):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                lane.append(each)
                ends.append(end)
                break
        else:
            lanes.append([each])
            open_in.append([end])
    return lanes


def _memory(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    """Counters of memory by kind: when a recording begins, and at every change."""
    held = Counter(rank.held)
    for kind, nbytes in held.items():
        yield _counter(rank, rank.begin, kind.value, nbytes)
    for change in rank.changes:
        held[change.kind] += change.nbytes
        yield _counter(rank, change.time, change.kind.value, held[change.kind])


def _counter(rank: RankTimeline, time: float, kind: str, nbytes: int) -> dict[str, Any]:
    return {
        "ph": "C",
        "pid": rank.rank,
        "ts": _us(time),
        "name": f"memory: {kind}",
        "args": {"MiB": round(nbytes / 2**20, 3)},
    }


def _of_prediction(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The predicted step, beside each step that was recorded."""
    predicted = timeline.prediction
    assert predicted is not None
    pid = 1 + max(rank.rank for rank in timeline.ranks)
    tracks: dict[str, list[_Slice]] = defaultdict(list)
    for step in timeline.ranks[0].steps:
        for span in predicted.spans:
            begin, end = step.begin + span.begin, step.begin + span.begin + span.seconds
            cat = {"cat": span.activity.value}
            tracks[_track(span)].append((begin, end, _title(span), cat))
    yield from _process(pid, "predicted", -1, tracks)


def _process(
    pid: int, title: str, place: int, tracks: dict[str, list[_Slice]]
) -> Iterator[dict[str, Any]]:
    """A process, and everything on its tracks."""
    yield _named("process_name", pid, 0, title)
    yield {**_named("process_sort_index", pid, 0, ""), "args": {"sort_index": place}}
    for tid, (track, slices) in enumerate(_laid_out(tracks), start=1):
        yield _named("thread_name", pid, tid, track)
        yield {**_named("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}}
        for begin, end, name, more in slices:
            at, until = _us(begin), _us(end)
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "ts": at,
                "dur": max(0.0, round(until - at, 3)),
                **more,
            }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
