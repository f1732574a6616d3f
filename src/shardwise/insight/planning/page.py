"""A plan as one HTML page: the inspector's, with memory, traffic and time above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.base.html import bar, document, escape, keys
from shardwise.base.lazy import resource
from shardwise.base.observe import Memory
from shardwise.base.units import binary_size, seconds
from shardwise.insight.inspect import page as inspector
from shardwise.insight.inspect.report import Report
from shardwise.insight.planning.report import KINDS, Plan, bytes_of
from shardwise.insight.planning.text import NAMES, bytes_needed, head, notes, speeds

#: Hues of kinds of memory, in degrees.
_HUES = {
    Memory.PARAMETERS: 215,
    Memory.GRADIENTS: 175,
    Memory.OPTIMIZER: 265,
    Memory.FULL_PARAMETERS: 195,
    Memory.TRANSPORT: 320,
    Memory.ACTIVATIONS: 35,
    Memory.OTHER: 95,
}
#: Colors of parts of a step, as a timeline has them.
_COLORS = {
    "compute": "var(--forward)",
    "exposed communication": "var(--wait)",
    "optimizer": "var(--optimizer)",
    "host": "var(--runtime)",
}


def page(plan: Plan, layout: Report | None) -> str:
    """The HTML of the page.

    Args:
        plan: the plan.
        layout: who holds what; ``None`` to leave it out.
    """
    sections = list(_sections(plan))
    if layout is not None:
        return inspector.page(layout, sections)
    title = f"{plan.model} on {plan.settings.world}"
    heading = f"<header><h1>{escape(plan.model)}</h1></header>"
    return document(title, [heading, *sections])


def _sections(plan: Plan) -> Iterator[str]:
    yield f'<style>{resource(__name__, "page.css")}</style><div class="plan"><h2>Plan</h2><dl>'
    for label, text in head(plan):
        yield f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>"
    yield "</dl>"
    yield from _memory_bar(plan)
    if plan.step is not None:
        yield from _time_bar(plan)
    yield '<div class="tables">'
    for cells in (*bytes_needed(plan), *speeds(plan)):
        yield f"<div>{cells.for_page()}</div>"
    yield "</div>"
    for note in notes(plan):
        yield f"<p>{escape(note)}</p>"
    yield "</div>"


def _memory_bar(plan: Plan) -> Iterator[str]:
    rank = plan.ranks[0]
    parts = [
        (NAMES[kind], bytes_of(rank)[kind.value], f"hsl({_HUES[kind]} var(--s) var(--l))")
        for kind in KINDS
    ]
    limit = None if plan.available is None else plan.available.nbytes
    scale = max(rank.peak, limit or 0, 1)
    mark = ""
    if limit is not None:
        place = min(100 * limit / scale, 99.5)
        mark = f'<span class="limit" style="left:{place:.2f}%" title="{binary_size(limit)}"></span>'
    yield from _bar(
        f"memory at the peak: {rank.peak_moment}",
        [(name, binary_size(value), value / scale, color) for name, value, color in parts],
        mark,
    )


def _time_bar(plan: Plan) -> Iterator[str]:
    step = plan.step
    assert step is not None
    scale = max(sum(step.parts.values()), 1e-12)
    yield from _bar(
        f"time of a step: {seconds(step.seconds)}",
        [
            (name, seconds(value), value / scale, _COLORS[name])
            for name, value in step.parts.items()
        ],
    )


def _bar(title: str, parts: Sequence[tuple[str, str, float, str]], mark: str = "") -> Iterator[str]:
    """A bar with its title and the keys to its parts; for these see :func:`.html.bar`."""
    yield f"<p>{escape(title)}</p>"
    yield bar(parts, mark)
    yield keys((f"{name} {size}", color) for name, size, share, color in parts if share > 0)
