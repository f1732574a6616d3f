"""The report as one HTML page that loads nothing else and is readable without scripts.

Parameters that are sharded alike share a section and its pictures. Links select a section by
``:target``; the script adds what links cannot do: marking a rank, and arrow keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from shardwise.base.html import document, escape
from shardwise.base.lazy import resource
from shardwise.base.units import brief_size, counted
from shardwise.insight.inspect.picture import STYLE, draw_mesh, draw_parameter
from shardwise.insight.inspect.report import ParameterReport, Report, folded
from shardwise.insight.inspect.text import blocks_of, totals_of
from shardwise.insight.inspect.words import Row, shape_in_words


def page(report: Report, above: Iterable[str] = ()) -> str:
    """The HTML of the page.

    Args:
        report: what the page shows.
        above: HTML to show between the head and the parameters.
    """
    rows = folded(report.parameters)
    body = (
        *_head(report),
        *above,
        '<div class="columns">',
        *_navigation(rows),
        "<main>",
        *_sections(report, rows),
        "</main></div>",
        f"<script>{resource(__name__, 'page.js')}</script>",
    )
    style = f"{STYLE}\n{resource(__name__, 'page.css')}"
    return document(f"{report.model} on {report.grid}", body, style)


def _head(report: Report) -> Iterator[str]:
    yield f"<header><h1>{escape(report.model)}</h1><p>"
    yield escape(
        f"{report.numel:,} parameters, {brief_size(report.nbytes)}, on "
        f"{counted(report.grid.size, 'rank')}: {report.grid}"
    )
    yield "</p>"
    yield "<details><summary>Bytes per rank</summary>"
    yield totals_of(report.totals, "ranks").for_page()
    yield "<p>* estimates in the dtype of the parameters. Activations come on top.</p></details>"
    if report.remarks:
        yield f"<details open><summary>Remarks ({len(report.remarks)})</summary><ul>"
        for each in report.remarks:
            yield f"<li><b>{escape(each.kind)}</b> {escape(each.text)}</li>"
        yield "</ul></details>"
    yield "</header>"


def _navigation(rows: Sequence[Row[ParameterReport]]) -> Iterator[str]:
    """Links to all parameters, with repeated layers folded."""
    yield '<nav aria-label="Parameters"><h2>Parameters</h2><ul>'
    for prefix, group in groupby(rows, key=lambda row: row.prefix):
        members = list(group)
        if prefix:
            times = len(members[0].members)
            alike = f" <small>{times} alike</small>" if times > 1 else ""
            yield f"<li><details open><summary>{escape(prefix)}{alike}</summary><ul>"
        for row in members:
            size = brief_size(row.first.nbytes)
            yield (
                f'<li><a href="#{escape(row.full_name)}">{_breakable(row.name)}'
                f"<small>{escape(shape_in_words(row.first.shape))}, {size}</small></a></li>"
            )
        if prefix:
            yield "</ul></details></li>"
    yield "</ul></nav>"


def _sections(report: Report, rows: Sequence[Row[ParameterReport]]) -> Iterator[str]:
    alike: dict[object, list[Row[ParameterReport]]] = {}
    for row in rows:
        alike.setdefault((row.first.tiling, row.first.itemsize), []).append(row)
    for members in alike.values():
        first = members[0].first
        yield "<section>"
        for row in members:
            names = " ".join(name for each in row.members for name in (each.name, *each.aliases))
            yield f'<div class="title" id="{escape(row.full_name)}" data-names="{escape(names)}">'
            yield f"<h2>{_breakable(row.full_name)}</h2><p>{escape(_about(row))}</p></div>"
        label = f"of {members[0].full_name}"
        mesh = draw_mesh(report.grid, first).inline(f"the ranks and the blocks {label}")
        blocks = draw_parameter(first).inline(f"the blocks {label}")
        yield f'<div class="pictures"><figure class="mesh" tabindex="0">{mesh}</figure>'
        yield f"<figure>{blocks}</figure></div>"
        yield '<p class="chosen" aria-live="polite">Choose a rank to see its block.</p>'
        table = blocks_of(first).for_page()
        yield f"<details open><summary>Blocks</summary>{table}</details></section>"


def _about(row: Row[ParameterReport]) -> str:
    each = row.first
    parts = [
        f"{shape_in_words(each.shape)} {each.dtype}",
        f"{brief_size(each.nbytes)}",
        ", ".join(f"{name} {placement}" for name, placement in each.placements)
        or each.kind.meaning,
    ]
    if len(row.members) > 1:
        parts.append(f"{len(row.members)} alike")
    if each.aliases:
        parts.append(f"tied to {', '.join(each.aliases)}")
    if not each.trainable:
        parts.append("frozen")
    if each.group is not None:
        own = "its layer" if len(row.members) > 1 else each.group or "the model itself"
        parts.append(f"in the group of {own}")
    return " · ".join(parts)


def _breakable(name: str) -> str:
    """A name that may wrap after its dots."""
    return escape(name).replace(".", ".<wbr>")
