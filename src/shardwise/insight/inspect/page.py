"""The report as one HTML page that loads nothing else and is readable without scripts.

Parameters that are sharded alike share a section and its pictures. Links select a section by
``:target``; the script adds what links cannot do: marking a rank, and arrow keys.

The pictures are SVG. A block and the ranks that hold it have the same color. Every rank is drawn,
however thin; where there is no room for a label per rank, runs of ranks are labeled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product

from shardwise.base.html import document, escape
from shardwise.base.lazy import resource
from shardwise.base.units import binary_size, counted
from shardwise.insight.inspect.grid import Block, Grid, Tiling
from shardwise.insight.inspect.report import MEANINGS, ParameterReport, Report, folded
from shardwise.insight.inspect.text import blocks_of, totals_of
from shardwise.insight.inspect.words import (
    Row,
    block_in_words,
    dimension_name,
    holders_in_words,
    ranks_in_words,
    shape_in_words,
    spans_in_words,
)
from shardwise.sharding.part import Span

#: The style of all drawings; ``--h`` is the hue of a block, in degrees.
STYLE = """
svg{--ink:#1d2433;--dim:#5c6678;--line:#fff;--s:62%;--l:80%;--void:#e4e7ee;--mark:#111;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
@media(prefers-color-scheme:dark){svg{--ink:#e8ecf4;--dim:#a3adbf;--line:#14171f;--s:42%;--l:34%;
--void:#2a303c;--mark:#fff}}
.b{fill:hsl(var(--h) var(--s) var(--l));stroke:var(--line);stroke-width:.6}
.b.s{stroke:none}.b.v{fill:var(--void)}
.ring{fill:none;stroke:var(--mark);stroke-width:1.6;pointer-events:none}
text{fill:var(--ink);font-size:11px}.d{fill:var(--dim);font-size:10px}.t{font-size:8.5px}
.m{text-anchor:middle}.e{text-anchor:end}.n{font-weight:600}text{pointer-events:none}
""".strip().replace("\n", "")


@dataclass(frozen=True)
class Picture:
    """A part of a drawing.

    Attributes:
        width: width in the units of the drawing.
        height: height in the same units.
        body: SVG elements; the upper left corner is (0, 0).
    """

    width: float
    height: float
    body: str

    def at(self, x: float, y: float) -> str:
        """The elements, moved to another corner."""
        return f'<g transform="translate({_n(x)} {_n(y)})">{self.body}</g>'

    def inline(self, label: str) -> str:
        """The picture as an element of a page, which has the style; ``label`` describes it."""
        return f"<svg {self._attributes(label)}>{self.body}</svg>"

    def file(self, label: str) -> str:
        """The picture as a file of its own; ``label`` describes it."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" '
            f'height="{_n(self.height)}" {self._attributes(label)}>'
            f"<style>{STYLE}</style>{self.body}</svg>\n"
        )

    def _attributes(self, label: str) -> str:
        box = f"0 0 {_n(self.width)} {_n(self.height)}"
        return f'viewBox="{box}" role="img" aria-label="{escape(label)}"'


def words(x: float, y: float, text: str, kind: str = "", within: float = math.inf) -> str:
    """Text with its baseline at ``y``.

    Args:
        x: where it begins, ends or has its middle, as its class says.
        y: of its baseline.
        text: what it says.
        kind: a list of classes of the style.
        within: room for text of class ``t``; longer text is condensed.
    """
    classes = f' class="{kind}"' if kind else ""
    condensed = ""
    if len(text) * _SMALL > within:
        condensed = f' textLength="{_n(within)}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{classes}{condensed}>{escape(text)}</text>'


def outline(boxes: Sequence[tuple[float, float, float, float]]) -> str:
    """A path around boxes, each with x, y, width and height."""
    return "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes)


def shape(path: str, hue: float | None, classes: str, data: str, title: str) -> str:
    """A filled path with a tooltip; without a hue it has the color of empty space."""
    style = f' style="--h:{hue:.0f}"' if hue is not None else ""
    tooltip = f"<title>{escape(title)}</title>" if title else ""
    return f'<path class="{classes}" d="{path}"{style}{data}>{tooltip}</path>'


def ring(path: str) -> str:
    """A line that marks a shape. Draw it last: later elements would cover it."""
    return f'<path class="ring" d="{path}"/>'


def _n(number: float) -> str:
    """A number with at most two decimals and no trailing zeros."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


WIDTH = 356  # of each of the two pictures; a phone shows it without shrinking
_LABEL = 66  # width of the labels on the left
_ACROSS = 16  # most cells in a row
_PLOT = WIDTH - _LABEL - 4
_LEAST, _MOST = 96, 400  # height of a parameter
_LINE = 13  # height of a label
_SMALL = 5.4  # width of a digit of class t, with room to spare


def drawing(report: Report, parameter: ParameterReport, rank: int | None = None) -> str:
    """An SVG file with the mesh on the left and a parameter on the right.

    Args:
        report: the report.
        parameter: one of its parameters.
        rank: mark this rank and its block.
    """
    left = draw_mesh(report.grid, parameter, rank)
    right = draw_parameter(parameter, rank)
    top = 40
    copies = max((len(block.ranks) for block in parameter.tiling.blocks if block.numel), default=1)
    times = "" if copies == 1 else f", each block on {copies} ranks"
    title = words(8, 16, parameter.name, "n") + words(
        8,
        31,
        f"{shape_in_words(parameter.shape)} {parameter.dtype}, {binary_size(parameter.nbytes)}, "
        f"on {report.grid}{times}",
        "d",
    )
    height = top + max(left.height, right.height) + 8
    body = title + left.at(8, top) + right.at(WIDTH + 28, top)
    label = f"{parameter.name} over the {report.grid.size} ranks of {report.grid}"
    return Picture(2 * WIDTH + 36, height, body).file(label)


def draw_mesh(grid: Grid, parameter: ParameterReport, rank: int | None = None) -> Picture:
    """The mesh, with each rank in the color of the block that it holds."""
    hues = _hues(parameter.tiling)
    numbers = {block: number for number, block in enumerate(parameter.tiling.blocks)}
    across = min(grid.shape[-1], _ACROSS)
    wide = min((WIDTH - _LABEL) / across, 48)
    tall = 24 if grid.size <= 64 else 17
    small = " t" if wide < 24 else ""
    down = f"{grid.names[-2]} ↓, " if len(grid.names) > 1 else ""
    parts = [words(0, 10, f"{down}{grid.names[-1]} →", "d")]
    y: float = 16
    if grid.shape[-1] == across:
        y += 12
        parts += [
            words(_LABEL + (i + 0.5) * wide, y - 3, str(i), f"d m{small}") for i in range(across)
        ]
    panel, marks = "", ""
    for line in grid.lines(across):
        if line.panel != panel:
            panel = line.panel
            parts.append(words(0, y + 12, panel, "d n"))
            y += 18
        parts.append(words(_LABEL - 6, y + tall / 2 + 4, line.label, "d e"))
        for i, each in enumerate(line.ranks):
            x = _LABEL + i * wide
            path = outline([(x, y, wide, tall)])
            block = parameter.block(each)
            number = None if block is None else numbers[block]
            hue = None if block is None else hues.get(block)
            parts.append(_cell(each, number, parameter, hue, path))
            parts.append(words(x + wide / 2, y + tall / 2 + 4, str(each), f"m{small}"))
            marks += ring(path) if each == rank else ""
        y += tall
    return Picture(WIDTH, y + 4, "".join(parts) + marks)


def _cell(
    rank: int, number: int | None, parameter: ParameterReport, hue: float | None, path: str
) -> str:
    block = parameter.block(rank)
    held = (
        "does not have this parameter" if block is None else block_in_words(block, parameter.shape)
    )
    data = f' data-r="{rank}"' + ("" if number is None else f' data-b="{number}"')
    title = f"rank {rank}: {held}, {binary_size(parameter.nbytes_on(rank))}"
    return shape(path, hue, "c b v" if hue is None else "c b", data, title)


def draw_parameter(parameter: ParameterReport, rank: int | None = None) -> Picture:
    """The parameter as a rectangle to scale, divided into the blocks that ranks hold."""
    tiling = parameter.tiling
    rows, columns = _axes(tiling)
    width = float(_PLOT) if columns is not None else 150.0
    down, across = _edges(tiling, rows), _edges(tiling, columns)
    high, wide = max(down[-1], 1), max(across[-1], 1)
    height = min(max(width * high / wide, _LEAST, (len(down) - 1) * _LINE), _MOST)
    y_axis = _Axis(rows, down, 30, height / high)
    x_axis = _Axis(columns, across, _LABEL, width / wide)
    parts = [words(0, 10, _axis_title(tiling, rows, columns), "d")]
    parts += _blocks(parameter, y_axis, x_axis)
    parts += _labels(tiling, y_axis, x_axis)
    bottom = 30 + height
    if parameter.padding_nbytes:
        text = f"+ {binary_size(parameter.padding_nbytes)} padding on all ranks"
        path = outline([(_LABEL, bottom + 3, width, 11)])
        parts.append(shape(path, None, "b v", "", f"{text}, while gathered"))
        parts.append(words(_LABEL + width / 2, bottom + 11.5, text, "d m t"))
        bottom += 15
    own = None if rank is None else parameter.block(rank)
    if own is not None and own.numel:
        parts.append(ring(_path(own, y_axis, x_axis)))
    return Picture(WIDTH, bottom + 6, "".join(parts))


@dataclass(frozen=True)
class _Axis:
    """A dimension of the tensor in the drawing.

    Attributes:
        dim: the tensor dimension; ``None`` if the tensor has none to draw here.
        edges: indices where blocks begin or end, including both ends of the dimension.
        start: coordinate of the first element.
        scale: units per element.
    """

    dim: int | None
    edges: Sequence[int]
    start: float
    scale: float

    def spans(self, block: Block) -> Sequence[Span]:
        return [(0, self.edges[-1])] if self.dim is None else block.part[self.dim]

    def position(self, element: float) -> float:
        return self.start + element * self.scale

    def middle(self, span: Span) -> float:
        return self.position(span[0] + span[1] / 2)

    def runs(self, least: float) -> list[Span]:
        """The spans between edges, joined by a power of two if they are too short for a label."""
        count = len(self.edges) - 1
        together = 1
        while together < count and self._narrowest(together) < least:
            together *= 2
        starts = range(0, count, together)
        ends = [self.edges[min(first + together, count)] for first in starts]
        return [(self.edges[a], b - self.edges[a]) for a, b in zip(starts, ends, strict=True)]

    def _narrowest(self, together: int) -> float:
        """Length of the shortest span that joins ``together`` ones; the last may be shorter."""
        ends = self.edges[::together]
        return min((b - a for a, b in pairwise(ends)), default=math.inf) * self.scale


def _blocks(parameter: ParameterReport, y_axis: _Axis, x_axis: _Axis) -> Iterator[str]:
    tiling, hues = parameter.tiling, _hues(parameter.tiling)
    classes = "b s" if len(tiling.blocks) > 64 else "b"
    for number, block in enumerate(tiling.blocks):
        if block.numel:
            title = (
                f"{holders_in_words(block.ranks)}: "
                f"{block_in_words(block, tiling.shape)}, "
                f"{binary_size(block.numel * parameter.itemsize)}"
            )
            path = _path(block, y_axis, x_axis)
            yield shape(path, hues[block], classes, f' data-b="{number}"', title)


def _path(block: Block, y_axis: _Axis, x_axis: _Axis) -> str:
    spans = product(y_axis.spans(block), x_axis.spans(block))
    return outline(
        [
            (x_axis.position(a), y_axis.position(b), n * x_axis.scale, m * y_axis.scale)
            for (b, m), (a, n) in spans
        ]
    )


def _labels(tiling: Tiling, y_axis: _Axis, x_axis: _Axis) -> Iterator[str]:
    """Indices of rows on the left and of columns above, and ranks where there is room."""
    bands = y_axis.runs(_LINE)
    strips = x_axis.runs(6.0 + 5 * len(spans_in_words([(x_axis.edges[-1] - 1,) * 2], 0)))
    if y_axis.dim is not None:
        for band in bands:
            text = spans_in_words([band], 0)
            yield words(_LABEL - 6, y_axis.middle(band) + 4, text, "d e t", _LABEL - 6)
    if len(strips) > 1:
        for strip in strips:
            yield words(x_axis.middle(strip), y_axis.start - 5, spans_in_words([strip], 0), "d m t")
    for band in bands:
        labels = [(strip, _ranks_in(tiling, (y_axis, band), (x_axis, strip))) for strip in strips]
        if not all(_fits(text, strip, x_axis) for strip, text in labels):
            every = (0, x_axis.edges[-1])
            labels = [(every, _ranks_in(tiling, (y_axis, band), (x_axis, every)))]
        for strip, text in labels:
            if _fits(text, strip, x_axis):
                yield words(x_axis.middle(strip), y_axis.middle(band) + 4, text, "m")


def _fits(text: str, strip: Span, axis: _Axis) -> bool:
    return len(text) * 6.2 <= strip[1] * axis.scale


def _ranks_in(tiling: Tiling, *where: tuple[_Axis, Span]) -> str:
    """The ranks that hold elements in a box."""
    found = {
        rank
        for block in tiling.blocks
        if block.numel and all(_meet(axis.spans(block), span) for axis, span in where)
        for rank in block.ranks
    }
    return ranks_in_words(sorted(found))


def _meet(spans: Sequence[Span], other: Span) -> bool:
    return any(a < other[0] + other[1] and other[0] < a + n for a, n in spans)


def _axes(tiling: Tiling) -> tuple[int | None, int | None]:
    """The tensor dimensions that are drawn from top to bottom and from left to right."""
    dims = len(tiling.shape)
    cut = [
        dim
        for dim in range(1, dims)
        if any(block.numel and block.shape[dim] != tiling.shape[dim] for block in tiling.blocks)
    ]
    across = cut[0] if cut else 1
    return (0 if dims else None), (across if dims > 1 else None)


def _axis_title(tiling: Tiling, rows: int | None, columns: int | None) -> str:
    if rows is None:
        return "a scalar"
    ways = [(rows, "↓"), *([] if columns is None else [(columns, "→")])]
    return ", ".join(f"{tiling.shape[dim]:,} {dimension_name(dim)} {way}" for dim, way in ways)


def _edges(tiling: Tiling, dim: int | None) -> list[int]:
    """The indices along a dimension where blocks begin or end, including both ends."""
    if dim is None:
        return [0, 1]
    found = {0, tiling.shape[dim]}
    for block in tiling.blocks:
        for first, length in block.part[dim]:
            found |= {first, first + length}
    return sorted(found)


def _hues(tiling: Tiling) -> dict[Block, float]:
    """Hues in the order of the blocks, from orange to magenta: no two ends look alike."""
    filled = [block for block in tiling.blocks if block.numel]
    return {block: 20 + 300 * i / max(len(filled), 1) for i, block in enumerate(filled)}


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
        f"{report.numel:,} parameters, {binary_size(report.nbytes)}, on "
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
            size = binary_size(row.first.nbytes)
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
        f"{binary_size(each.nbytes)}",
        ", ".join(f"{name} {placement}" for name, placement in each.placements)
        or MEANINGS[each.kind],
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
