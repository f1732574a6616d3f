"""The report as text for a terminal of 80 columns or more."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.base import html
from shardwise.base.units import binary_size, counted, printable
from shardwise.insight.inspect.grid import Block
from shardwise.insight.inspect.report import (
    MOST_VALUES,
    ParameterReport,
    RankTotals,
    Report,
    folded,
    unfolded,
)
from shardwise.insight.inspect.words import (
    Row,
    add_rows,
    dimension_name,
    holders_in_words,
    ranks_in_words,
    shape_in_words,
    spans_in_words,
)

_MOST_LINES = 16  # of the mesh
_MOST_BLOCKS = 32  # that are listed one by one
_LEAST_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class View:
    """The part of a report to show.

    Attributes:
        rank: show what this rank holds; ``None`` for all ranks.
        pattern: show only parameters whose name matches, with all their blocks.
        layers: show repeated layers one by one.
        full: show repeated layers one by one, and all blocks of every parameter.
        width: number of columns; ``None`` for those of the terminal.
    """

    rank: int | None = None
    pattern: str | None = None
    layers: bool = False
    full: bool = False
    width: int | None = None


@dataclass(frozen=True)
class Cells:
    """A table that terminals and pages show.

    Attributes:
        heads: of its columns.
        rows: the text of each cell.
        words: how many of the first columns have words; the others have figures.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def for_terminal(self) -> Table:
        """Return the table without lines."""
        table = plain_table(*self.heads[: self.words])
        add_figures(table, *self.heads[self.words :])
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def for_page(self) -> str:
        """Return the table as HTML."""
        return html.table(self.heads, self.rows)


def as_text(report: Report, view: View | None = None) -> str:
    """Format the report, or a view of it, without a newline at the end."""
    view = view or View()
    return rendered(_parts(report, view), view.width)


def rendered(parts: Iterable[Text | Table | Padding], width: int | None = None) -> str:
    """Format texts and tables one below the other, without a newline at the end.

    Args:
        parts: what to format.
        width: number of columns; ``None`` for those of the terminal.
    """
    width = width or shutil.get_terminal_size((80, 24)).columns
    out = io.StringIO()
    console = Console(
        file=out, width=max(width, _LEAST_WIDTH), color_system=None, highlight=False, emoji=False
    )
    for part in parts:
        console.print(part)
    lines = "\n".join(line.rstrip() for line in printable(out.getvalue(), keep="\n").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _parts(report: Report, view: View) -> Iterator[Text | Table | Padding]:
    yield Text(_title(report))
    yield Text()
    yield _mesh(report, view.rank)
    yield Text()
    found = report.matching(view.pattern)
    rows = (unfolded if view.layers or view.full else folded)(found)
    if view.rank is not None:
        yield _rank_table(rows, view.rank)
    elif view.full or view.pattern is not None:
        yield from _block_tables(rows)
    else:
        yield _table(report, rows)
    yield Text()
    if view.pattern is None:
        yield from _totals(report, view.rank)
    if view.pattern is None and view.rank is None:
        yield from _remarks(report)
    if report.values is not None:
        yield from _values(report.values, found, view.rank)


def _title(report: Report) -> str:
    dtypes = _dtypes(report)
    dtype = f", {dtypes[0]}" if len(dtypes) == 1 else ""
    return (
        f"{report.model}: {report.numel:,} parameters, {binary_size(report.nbytes)}{dtype}, "
        f"on {counted(report.grid.size, 'rank')}: {report.grid}"
    )


def _dtypes(report: Report) -> list[str]:
    return sorted({each.dtype for each in report.parameters})


def _mesh(report: Report, rank: int | None) -> Table:
    """The ranks of the mesh, line by line, with ``rank`` in brackets."""
    grid = report.grid
    digits = len(str(max(grid.ranks))) + 2
    lines = list(grid.lines(8))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    down = f"{grid.names[-2]} \\ " if len(grid.names) > 1 else ""
    last = lines[0].ranks
    across = len(last) == grid.shape[-1]
    numbers = "".join(f"{i:>{digits}} " for i in range(len(last))) if across else ""
    table.add_row(Text(f"{down}{grid.names[-1]}"), Text(numbers))
    shown = lines if len(lines) <= _MOST_LINES else [*lines[:5], None, *lines[-3:]]
    panel = ""
    for line in shown:
        if line is None:
            table.add_row(Text("..."), Text(""))
            continue
        if line.panel != panel:
            panel = line.panel
            table.add_row(Text(panel), Text(""))
        cells = (f"[{r}]" if r == rank else f"{r} " for r in line.ranks)
        text = "".join(f"{cell:>{digits + 1}}" for cell in cells)
        table.add_row(Text(line.label or "ranks", justify="right"), Text(text))
    return table


def _table(report: Report, rows: Sequence[Row[ParameterReport]]) -> Table:
    """How each parameter is sharded, and the largest block that a rank holds of it."""
    table = plain_table("parameter", "shape")
    mixed = len(_dtypes(report)) > 1
    if mixed:
        table.add_column("dtype", no_wrap=True)
    for name in report.grid.names:  # short names leave room for those of parameters
        short = name.removeprefix("dp_").replace("replicate", "repl")
        table.add_column(short, no_wrap=True)
    table.add_column("per rank", no_wrap=True)
    add_figures(table, "bytes")

    def cells(row: Row[ParameterReport]) -> list[str]:
        each = row.first
        largest = max(each.tiling.blocks, key=lambda block: block.numel)
        even = len({block.shape for block in each.tiling.blocks}) == 1
        return [
            shape_in_words(each.shape),
            *([each.dtype] if mixed else []),
            *("S(" + ",".join(map(str, dims)) + ")" if dims else "R" for dims in each.cut_along),
            ("" if even else "<= ") + shape_in_words(largest.shape),
            binary_size(largest.numel * each.itemsize),
        ]

    add_rows(table, rows, cells)
    return table


def _rank_table(rows: Sequence[Row[ParameterReport]], rank: int) -> Table:
    """What one rank holds of each parameter."""
    table = plain_table("parameter", "rows", "columns", "shape")
    add_figures(table, "bytes", "padding")

    def cells(row: Row[ParameterReport]) -> list[str]:
        each = row.first
        block = each.block(rank)
        if block is None:
            return ["-"] * 5
        spans = [spans_in_words(s, n) for s, n in zip(block.part, each.shape, strict=True)]
        rows, columns = [*spans, "", ""][:2]
        return [rows, columns, shape_in_words(block.shape), *_sizes(each, block)]

    add_rows(table, rows, cells)
    return table


def _block_tables(rows: Sequence[Row[ParameterReport]]) -> Iterator[Text | Padding]:
    """A table of all blocks for each row."""
    for row in rows:
        each = row.first
        times = f"  ({len(row.members)} alike)" if len(row.members) > 1 else ""
        placements = ", ".join(f"{name} {placement}" for name, placement in each.placements)
        tied = f", tied to {', '.join(each.aliases)}" if each.aliases else ""
        yield Text(
            f"{row.full_name}{times}: {shape_in_words(each.shape)} {each.dtype}, "
            f"{binary_size(each.nbytes)}, {placements or each.kind.value}{tied}"
        )
        yield Padding(blocks_of(each).for_terminal(), (0, 0, 1, 2))


def _totals(report: Report, rank: int | None) -> Iterator[Text | Table]:
    shown = [each for each in report.totals if rank in (None, each.rank)]
    yield totals_of(shown, "bytes per rank").for_terminal()
    yield Text("* estimates in the dtype of the parameters. Activations and unsharded parameters")
    yield Text("  come on top.")


def _remarks(report: Report) -> Iterator[Text | Padding]:
    if report.remarks:
        yield Text()
        yield Text("remarks")
    for remark in report.remarks:
        yield Padding(Text(f"{remark.kind}: {remark.text}"), (0, 0, 0, 2))


def _values(
    values: Mapping[str, Mapping[int, Any]], found: Sequence[ParameterReport], rank: int | None
) -> Iterator[Text | Padding]:
    yield Text()
    yield Text(f"values of parameters with at most {MOST_VALUES} elements")
    shown = [each for each in found if each.name in values]
    if not shown:
        yield Padding(Text("none"), (0, 0, 0, 2))
    for each in shown:
        yield Padding(Text(f"{each.name}, {shape_in_words(each.shape)}"), (0, 0, 0, 2))
        holders: dict[str, list[int]] = {}
        for own, elements in values[each.name].items():
            if rank in (None, own):
                holders.setdefault(str(elements), []).append(own)
        for text, ranks in holders.items():
            yield Padding(Text(f"{holders_in_words(ranks)}: {text}"), (0, 0, 0, 4))


def plain_table(*columns: str) -> Table:
    """A table without lines; in a narrow terminal, text of the first column wraps."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index > 0)
    return table


def add_figures(table: Table, *columns: str) -> None:
    """Add columns of numbers to a table."""
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


# -- tables that the page shows too ------------------------------------------------------------


def totals_of(totals: Iterable[RankTotals], head: str) -> Cells:
    """A table of totals: ranks with the same figures share a row.

    Args:
        totals: of ranks.
        head: of their column.
    """
    ranks_by_cells: dict[tuple[str, ...], list[int]] = {}
    for each in totals:
        total = each.parameters + each.gradients + each.optimizer
        figures = (each.parameters, each.replicated, each.gradients, each.optimizer, total)
        ranks_by_cells.setdefault(tuple(map(binary_size, figures)), []).append(each.rank)
    return Cells(
        (head, "parameters", "replicated", "gradients*", "Adam*", "total*"),
        [(holders_in_words(sorted(ranks)), *cells) for cells, ranks in ranks_by_cells.items()],
    )


def blocks_of(parameter: ParameterReport) -> Cells:
    """A table of blocks: ranks, indices along each dimension, bytes and padding.

    If there are many blocks, a run of blocks of one shape at regular distances shares a row.
    """
    blocks = parameter.tiling.blocks
    runs = [[block] for block in blocks] if len(blocks) <= _MOST_BLOCKS else _runs(blocks)
    words = ("ranks", *map(dimension_name, range(len(parameter.shape))))
    rows = [_block_row(parameter, run) for run in runs]
    return Cells((*words, "bytes", "padding"), rows, len(words))


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and _continues(runs[-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _continues(run: Sequence[Block], block: Block) -> bool:
    last = run[-1]
    if (last.shape, last.padding) != (block.shape, block.padding):
        return False
    if len(last.ranks) != len(block.ranks):
        return False
    return len(run) < 2 or _distance(run[-2], last) == _distance(last, block)


def _distance(one: Block, other: Block) -> object:
    """By how much the positions and the ranks of two blocks differ."""
    starts = [
        [b[0] - a[0] for a, b in zip(first, second, strict=False)]
        for first, second in zip(one.part, other.part, strict=True)
    ]
    return starts, [b - a for a, b in zip(one.ranks, other.ranks, strict=False)]


def _block_row(parameter: ParameterReport, run: Sequence[Block]) -> tuple[str, ...]:
    first, last = run[0], run[-1]
    ranks = ranks_in_words([rank for block in run for rank in block.ranks])
    if len(run) > 1 and len(first.ranks) > 1:
        ranks = f"{ranks_in_words(first.ranks)}; to {ranks_in_words(last.ranks)}"
    spans = [_spans_of_run(run, dim, size) for dim, size in enumerate(parameter.shape)]
    return ranks, *spans, *_sizes(parameter, first)


def _spans_of_run(run: Sequence[Block], dim: int, size: int) -> str:
    first, last = (spans_in_words(block.part[dim], size) for block in (run[0], run[-1]))
    return first if first == last else f"{run[0].shape[dim]} each: {first} to {last}"


def _sizes(parameter: ParameterReport, block: Block) -> tuple[str, str]:
    """Bytes and padding of a block; no text where there is no padding."""
    padding = binary_size(block.padding * parameter.itemsize) if block.padding else ""
    return binary_size(block.numel * parameter.itemsize), padding
