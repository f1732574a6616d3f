"""The timeline as one HTML page that loads nothing else, and as a trace for viewers of traces.

On the page, steps stand side by side, and ranks are rows. What each rank did at which moment is in
the trace, beside what was predicted.

The trace is for Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``, in Chrome's "Trace
Event Format", in JSON: Perfetto reads it, and anything can write it. (The package ``perfetto``
writes protobuf, and needs protobuf; viztracer traces Python functions.) A rank is a process of the
trace, and what it does at once lies on several tracks of it: steps; groups; each thread of the
host; the device; each mesh dimension's collectives; its memory by kind. Slices of one track have to
be nested, so what overlaps is put on further tracks of the same name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardwise.base import units
from shardwise.base.html import bar, document, escape, keys, table
from shardwise.base.lazy import resource
from shardwise.base.observe import Activity
from shardwise.base.spans import Span, StepTime
from shardwise.base.units import counted
from shardwise.timeline.rank import COLLECTIVES, MemoryChange, RankTimeline
from shardwise.timeline.steps import Part, StepOfAll, StepOfRank, Timeline

#: Tracks of a rank in a trace, from the top down; those of collectives follow.
_TRACKS = ("steps", "groups", "device", "host")
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
    yield from _counters(rank)
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


def _laid_out(tracks: Mapping[str, list[_Slice]]) -> Iterator[tuple[str, list[_Slice]]]:
    """Return tracks whose slices are nested, from the top down."""

    def place(name: str) -> tuple[int, str]:
        return (_TRACKS.index(name) if name in _TRACKS else len(_TRACKS)), name

    for name in sorted(tracks, key=place):
        for lane in nested(tracks[name]):
            yield name, lane


def nested(slices: Iterable[_Slice]) -> list[list[_Slice]]:
    """Divide slices into lanes, in each of which any two are apart or one is inside the other."""
    lanes: list[list[_Slice]] = []
    # By lane, the ends of the slices that are open, outermost first.
    open_in: list[list[float]] = []
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


def _counters(rank: RankTimeline) -> Iterator[dict[str, Any]]:
    """Counters of memory by kind: when a recording begins, and at every change."""
    held = Counter(rank.held)
    begun = (MemoryChange(rank.begin, kind, "", 0) for kind in rank.held)
    for change in (*begun, *rank.changes):
        held[change.kind] += change.nbytes
        yield {
            "ph": "C",
            "pid": rank.rank,
            "ts": _us(change.time),
            "name": f"memory: {change.kind.value}",
            "args": {"MiB": round(held[change.kind] / 2**20, 3)},
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


#: What a page shows at most. The rest is in the trace.
MOST_RANKS, MOST_STEPS = 32, 8

_VIEWER = "https://ui.perfetto.dev"

_WAITS = 12  # rows of the table of waits

_MEANING = {
    Part.FORWARD: "forward",
    Part.BACKWARD: "backward",
    Part.RECOMPUTE: "forward again, in backward",
    Part.OPTIMIZER: "optimizer",
    Part.RUNTIME: "issuing collectives",
    Part.COPY: "copying",
    Part.WAIT: "waiting (exposed communication)",
    Part.OTHER: "other: data, loss, logging",
}


def page(timeline: Timeline) -> str:
    """Return the HTML of the page."""
    steps = timeline.steps[-MOST_STEPS:]
    ranks = _shown(timeline)
    body = (
        *_head(timeline, steps),
        *_steps(timeline, steps, ranks),
        *_detail(),
        *_waits(timeline),
        *_memory(timeline),
    )
    return document("Timeline", body, resource(__name__, "page.css"))


def _shown(timeline: Timeline) -> list[RankTimeline]:
    """Return the ranks that the page has: all, or rank 0 and the slowest and fastest ones."""
    ranks, step = list(timeline.ranks), timeline.typical
    if len(ranks) <= MOST_RANKS or step is None:
        return ranks[:MOST_RANKS]
    by_pace = [each.rank for each in sorted(step.ranks, key=lambda each: -each.busy)]
    half = MOST_RANKS // 2
    wanted = {ranks[0].rank, *by_pace[:half], *by_pace[-half + 1 :]}
    return [rank for rank in ranks if rank.rank in wanted]


# -- what is said ----------------------------------------------------------------------------------


def _head(timeline: Timeline, steps: Sequence[StepOfAll]) -> Iterator[str]:
    summary = timeline.summary()
    yield f"<header><h1>Timeline</h1><p>{escape(f'{summary[:1].upper()}{summary[1:]}.')}</p>"
    yield '<p class="soft">'
    hosts = len({rank.host for rank in timeline.ranks})
    facts = [
        counted(len(timeline.ranks), "rank") + f" on {counted(hosts, 'host')}",
        *sorted({rank.device for rank in timeline.ranks}),
        counted(len(timeline.steps), "step"),
    ]
    if len(steps) < len(timeline.steps):
        facts.append(f"the last {len(steps)} are shown")
    off = max((rank.uncertainty for rank in timeline.ranks), default=0.0)
    if off:
        facts.append(f"clocks of hosts agree within {units.seconds(off)}")
    yield escape(" · ".join(facts))
    yield "</p>"
    if timeline.missing:
        named = ", ".join(map(str, timeline.missing[:20]))
        yield f'<p class="bad">Nothing is known of the ranks {named}.</p>'
    for rank in timeline.ranks:
        if rank.error:
            yield f'<p class="bad">Rank {rank.rank} ended with {escape(rank.error)}</p>'
    dropped = sum(rank.dropped for rank in timeline.ranks)
    if dropped:
        yield (
            f'<p class="soft">{dropped:,} of the oldest spans and changes were dropped: record '
            "fewer steps to keep all.</p>"
        )
    yield "</header>"


def _steps(
    timeline: Timeline, steps: Sequence[StepOfAll], ranks: Sequence[RankTimeline]
) -> Iterator[str]:
    """Steps side by side, ranks as rows, each a bar of its parts."""
    yield "<section><h2>Steps</h2>"
    yield keys((meaning, _color(part)) for part, meaning in _MEANING.items())
    if not steps:
        yield "<p>No step was recorded.</p></section>"
        return
    predicted = timeline.prediction
    longest = max([step.seconds for step in steps] + ([predicted.seconds] if predicted else []))
    yield '<div class="scroll" tabindex="0" role="region" aria-label="steps"><table class="steps">'
    yield '<thead><tr><th scope="col">rank</th>'
    for step in steps:
        yield f'<th scope="col">{_step(step)}</th>'
    yield "</tr></thead><tbody>"
    if predicted is not None:
        yield '<tr class="predicted"><th scope="row">predicted</th>'
        for step in steps:
            yield f'<td data-head="{_step(step)}">{_bar(_predicted_parts(predicted), longest)}</td>'
        yield "</tr>"
    for rank in ranks:
        yield f'<tr><th scope="row">{rank.rank}</th>'
        for step in steps:
            mine = next((each for each in step.ranks if each.rank == rank.rank), None)
            cell = "" if mine is None else _cell(mine, step, longest)
            yield f'<td data-head="{_step(step)}">{cell}</td>'
        yield "</tr>"
    yield "</tbody></table></div></section>"


def _step(step: StepOfAll) -> str:
    return f"step {step.number}, {units.seconds(step.seconds)}"


def _cell(mine: StepOfRank, step: StepOfAll, longest: float) -> str:
    waiting = mine.parts[Part.WAIT]
    words = f"waits {units.seconds(waiting)}" if waiting else "no waits"
    mark = ' <b class="bad">slowest</b>' if mine.rank == _waited_for(step) else ""
    return f"{_bar(mine.parts, longest)}<small>{words}{mark}</small>"


def _waited_for(step: StepOfAll) -> int | None:
    """Return the slowest rank, if any other had to wait."""
    others = (each.parts[Part.WAIT] for each in step.ranks if each.rank != step.slowest)
    return step.slowest if any(others) else None


def _predicted_parts(predicted: StepTime) -> dict[Part, float]:
    return {
        Part.FORWARD: predicted.compute / 3,  # backward computes twice as much
        Part.BACKWARD: predicted.compute * 2 / 3,
        Part.OPTIMIZER: predicted.optimizer,
        Part.RUNTIME: predicted.host,
        Part.WAIT: predicted.exposed,
    }


def _bar(parts: Any, longest: float) -> str:
    """A bar of the parts of a step, as long as the step took."""
    scale = longest or 1.0
    return bar(
        (_MEANING[part], units.seconds(seconds), seconds / scale, _color(part))
        for part in Part
        for seconds in [parts.get(part, 0.0)]
    )


def _color(part: Part) -> str:
    return f"var(--{part.name.lower()})"


def _detail() -> Iterator[str]:
    """Where to see what each rank did at which moment.

    A run's page frames this one: links open tabs, and none leads to a file that lies beside it.
    """
    yield "<section><h2>One step in detail</h2><p>What each rank did at which moment is in "
    yield "<code>trace.json</code>, beside <code>timeline.html</code>. "
    yield f'Open <a href="{_VIEWER}" target="_blank">{_VIEWER}</a> and drop the file there: your '
    yield "browser reads it, and sends it nowhere. Without a network, load it in "
    yield "<code>chrome://tracing</code>, in Chrome or Chromium.</p></section>"


def _waits(timeline: Timeline) -> Iterator[str]:
    """The longest waits of the typical step, and who waited for whom."""
    step = timeline.typical
    if step is None:
        return
    rows = sorted(
        ((wait.seconds, mine.rank, wait) for mine in step.ranks for wait in mine.waits),
        key=lambda row: (-row[0], row[1]),
    )[:_WAITS]
    yield f"<section><h2>Exposed waits of step {step.number}</h2>"
    if not rows:
        yield "<p>No rank waited.</p></section>"
        return
    yield table(
        ("rank", "waits for the collective of", "over", "time", "because of"),
        [
            (
                str(rank),
                wait.name or "a collective of the program",
                wait.dimension or "all ranks",
                units.seconds(seconds),
                "bytes under way" if wait.peer is None else f"rank {wait.peer}, which came late",
            )
            for seconds, rank, wait in rows
        ],
    )
    yield "</section>"


def _memory(timeline: Timeline) -> Iterator[str]:
    """The peak of each kind of memory, by rank."""
    rows = []
    for rank in timeline.ranks[:MOST_RANKS]:
        now, most = dict(rank.held), dict(rank.held)
        for change in rank.changes:
            now[change.kind] = now.get(change.kind, 0) + change.nbytes
            most[change.kind] = max(most.get(change.kind, 0), now[change.kind])
        rows.append((rank.rank, most))
    kinds = list(dict.fromkeys(kind for _, most in rows for kind in most))
    if not kinds:
        return
    yield "<section><h2>Memory at its peak</h2>"
    yield (
        '<p class="soft">What the runtime allocated, each kind at its own peak. Activations are '
        "torch's, and not counted.</p>"
    )
    yield table(
        ("rank", *(kind.value.replace("_", " ") for kind in kinds)),
        [
            (str(rank), *(units.binary_size(most.get(kind, 0)) for kind in kinds))
            for rank, most in rows
        ],
    )
    yield "</section>"
