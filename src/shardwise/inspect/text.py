"""The report as text for a terminal of 80 columns or more."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.inspect.read import MOST_ELEMENTS
from shardwise.inspect.report import ParameterReport, RankTotals, Report, folded, unfolded
from shardwise.inspect.tiling import Block
from shardwise.inspect.words import (
    Row,
    counted,
    dimension_name,
    ranks_in_words,
    shape_in_words,
    spans_in_words,
)
from shardwise.units import brief_size

_MOST_LINES = 16  # of the mesh
_LEAST_WIDTH = 60


@dataclass(frozen=True, kw_only=True)
class View:
    """What of a report to show.

    Attributes:
        rank: what this rank holds, instead of what all do.
        pattern: only parameters whose name matches, with all their blocks.
        layers: every layer by itself.
        full: every layer by itself, and all blocks of every parameter.
        width: columns; ``None``: those of the terminal.
    """

    rank: int | None = None
    pattern: str | None = None
    layers: bool = False
    full: bool = False
    width: int | None = None


def as_text(report: Report, view: View | None = None) -> str:
    """The report, or a view of it, as lines without a line break at the end."""
    view = view or View()
    width = view.width or shutil.get_terminal_size((80, 24)).columns
    out = io.StringIO()
    console = Console(
        file=out, width=max(width, _LEAST_WIDTH), color_system=None, highlight=False, emoji=False
    )
    for part in _parts(report, view):
        console.print(part)
    lines = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _parts(report: Report, view: View) -> Iterator[Text | Table | Padding]:
    dtypes = {each.dtype for each in report.parameters}
    kind = f", {next(iter(dtypes))}" if len(dtypes) == 1 else ""
    grid = report.grid
    yield Text(
        f"{report.model}: {report.numel:,} parameters, {brief_size(report.nbytes)}{kind}, "
        f"on {counted(grid.size, 'rank')}: {grid}"
    )
    yield Text()
    yield _mesh(report, view.rank)
    yield Text()
    found = report.matching(view.pattern)
    each_block = view.full or view.pattern is not None
    rows = (unfolded if view.layers or view.full else folded)(found)
    if view.rank is not None:
        yield _rank_table(rows, view.rank)
    elif each_block:
        yield from _block_tables(rows)
    else:
        yield _table(report, rows, dtypes)
    yield Text()
    if view.pattern is None:
        yield from _summary(report, view.rank)
    if report.values is not None:
        yield from _values(report, found, view.rank)


def _mesh(report: Report, rank: int | None) -> Table:
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


def _table(report: Report, rows: Sequence[Row[ParameterReport]], dtypes: set[str]) -> Table:
    """A line for every row: how it is cut, and what a rank holds."""
    table = _plain("parameter", "shape")
    if len(dtypes) > 1:
        table.add_column("dtype", no_wrap=True)
    for name in report.grid.names:
        table.add_column(_short(name), no_wrap=True)
    table.add_column("a rank holds", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    columns = len(table.columns)
    for prefix, group in groupby(rows, key=lambda row: row.prefix):
        members = list(group)
        if prefix:
            times = len(members[0].members)
            text = f"{prefix}  ({times} alike)" if times > 1 else prefix
            table.add_row(Text(text), *[""] * (columns - 1))
        for row in members:
            table.add_row(*_cells(row, len(dtypes) > 1))
    return table


def _cells(row: Row[ParameterReport], with_dtype: bool) -> list[Text]:
    each = row.first
    cells = [_name(row), shape_in_words(each.shape)]
    if with_dtype:
        cells.append(each.dtype)
    cells += [_cut(dims) for dims in each.cut_along]
    blocks = each.tiling.blocks
    most = max(blocks, key=lambda block: block.numel)
    even = len({block.shape for block in blocks}) == 1
    cells.append(("" if even else "<= ") + shape_in_words(most.shape))
    cells.append(brief_size(most.numel * each.itemsize))
    return [Text(cell) for cell in cells]


def _cut(dims: Sequence[int]) -> str:
    return "S(" + ",".join(map(str, dims)) + ")" if dims else "R"


def _name(row: Row[ParameterReport]) -> str:
    return ("  " if row.prefix else "") + row.name


def _rank_table(rows: Sequence[Row[ParameterReport]], rank: int) -> Table:
    """What one rank holds of every row."""
    table = _plain("parameter", "rows", "columns", "holds")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("padding", justify="right", no_wrap=True)
    for prefix, group in groupby(rows, key=lambda row: row.prefix):
        members = list(group)
        if prefix:
            times = len(members[0].members)
            text = f"{prefix}  ({times} alike)" if times > 1 else prefix
            table.add_row(Text(text), *[""] * 5)
        for row in members:
            each = row.first
            block = each.block(rank)
            if block is None:
                table.add_row(Text(_name(row)), "-", "-", "-", "-", "-")
                continue
            spans = [spans_in_words(s, n) for s, n in zip(block.part, each.shape, strict=True)]
            where = [*spans[:2], *["" for _ in spans[2:]], "", ""][:2]
            table.add_row(
                *map(
                    Text,
                    (
                        _name(row),
                        *where,
                        shape_in_words(block.shape),
                        brief_size(block.numel * each.itemsize),
                        brief_size(block.padding * each.itemsize) if block.padding else "",
                    ),
                )
            )
    return table


def _block_tables(rows: Sequence[Row[ParameterReport]]) -> Iterator[Text | Padding]:
    """Every row with a table of its blocks."""
    for row in rows:
        each = row.first
        times = f"  ({len(row.members)} alike)" if len(row.members) > 1 else ""
        cuts = ", ".join(f"{name} {placement}" for name, placement in each.placements)
        tied = f", tied to {', '.join(each.aliases)}" if each.aliases else ""
        yield Text(
            f"{row.full_name}{times}: {shape_in_words(each.shape)} {each.dtype}, "
            f"{brief_size(each.nbytes)}, {cuts or each.kind.value}{tied}"
        )
        table = _plain("ranks", *(dimension_name(dim) for dim in range(len(each.shape))))
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("padding", justify="right", no_wrap=True)
        for run in runs_of(each):
            table.add_row(*map(Text, run.cells))
        yield Padding(table, (0, 0, 1, 2))


def _summary(report: Report, rank: int | None) -> Iterator[Text | Table | Padding]:
    totals = [each for each in report.totals if rank in (None, each.rank)]
    table = _plain("bytes on a rank")
    for name in ("parameters", "same elsewhere", "gradients*", "Adam*", "all*"):
        table.add_column(name, justify="right", no_wrap=True)
    for cells in rank_rows(totals):
        table.add_row(*map(Text, cells))
    yield table
    yield Text("* estimates, in the dtype of the parameters: gradients while they are there, and")
    yield Text("  Adam's two states. Activations and parameters while unsharded come on top.")
    if report.remarks and rank is None:
        yield Text()
        yield Text("what to mind")
        for remark in report.remarks:
            yield Padding(Text(f"{remark.kind}: {remark.text}"), (0, 0, 0, 2))


def rank_rows(totals: Iterable[RankTotals]) -> Iterator[tuple[str, ...]]:
    """Cells of a table: ranks of which the same is told, and what they hold."""
    found: dict[tuple[str, ...], list[int]] = {}
    for each in totals:
        state = each.gradients + each.optimizer
        figures = (
            each.parameters,
            each.replicated,
            each.gradients,
            each.optimizer,
            each.parameters + state,
        )
        found.setdefault(tuple(map(brief_size, figures)), []).append(each.rank)
    for told, ranks in found.items():
        head = "rank" if len(ranks) == 1 else "ranks"
        yield f"{head} {ranks_in_words(sorted(ranks))}", *told


def _values(
    report: Report, found: Sequence[ParameterReport], rank: int | None
) -> Iterator[Text | Padding]:
    assert report.values is not None
    yield Text()
    yield Text(f"values of parameters with at most {MOST_ELEMENTS} elements")
    if not any(each.name in report.values for each in found):
        yield Padding(Text("there is none"), (0, 0, 0, 2))
    for each in found:
        held = report.values.get(each.name)
        if held is None:
            continue
        yield Padding(Text(f"{each.name}, {shape_in_words(each.shape)}"), (0, 0, 0, 2))
        for ranks, elements in _same_values(held, rank):
            head = "rank" if len(ranks) == 1 else "ranks"
            yield Padding(Text(f"{head} {ranks_in_words(ranks)}: {elements}"), (0, 0, 0, 4))


def _same_values(held: object, rank: int | None) -> Iterator[tuple[list[int], str]]:
    assert isinstance(held, dict)
    found: dict[str, list[int]] = {}
    for own, elements in held.items():
        if rank in (None, own):
            found.setdefault(str(elements), []).append(own)
    for elements, ranks in found.items():
        yield ranks, elements


def _plain(*columns: str) -> Table:
    """A table without lines; names are folded where the terminal is narrow."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index > 0)
    return table


def _short(name: str) -> str:
    """The name of a mesh dimension above its column, so that names of parameters have room."""
    return name.removeprefix("dp_").replace("replicate", "repl")


_MOST = 32  # blocks that are told one by one


@dataclass(frozen=True)
class Run:
    """Blocks of one size that follow each other, as cells of a table.

    Attributes:
        blocks: the blocks.
        cells: ranks, what they hold along each dimension, bytes of each, padding of each.
    """

    blocks: tuple[Block, ...]
    cells: tuple[str, ...]


def runs_of(parameter: ParameterReport) -> list[Run]:
    """All blocks of a parameter, as runs if there are many."""
    blocks = parameter.tiling.blocks
    if len(blocks) <= _MOST:
        return [_run(parameter, [block]) for block in blocks]
    return [_run(parameter, run) for run in _regular(blocks)]


def _regular(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Runs of blocks of one shape, of which each is as far from the next as from the one before."""
    run: list[Block] = []
    for block in blocks:
        if run and not _goes_on(run, block):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _goes_on(run: Sequence[Block], block: Block) -> bool:
    last = run[-1]
    same = (last.shape, last.padding, len(last.ranks)) == (
        block.shape,
        block.padding,
        len(block.ranks),
    )
    return same and (len(run) < 2 or _step(run[-2], last) == _step(last, block))


def _step(one: Block, other: Block) -> object:
    starts = [
        [b[0] - a[0] for a, b in zip(first, second, strict=False)]
        for first, second in zip(one.part, other.part, strict=True)
    ]
    return starts, [b - a for a, b in zip(one.ranks, other.ranks, strict=False)]


def _run(parameter: ParameterReport, run: Sequence[Block]) -> Run:
    first, last = run[0], run[-1]
    spans = [_along(run, dim, size) for dim, size in enumerate(parameter.shape)]
    ranks = ranks_in_words([rank for block in run for rank in block.ranks])
    if len(run) > 1 and len(first.ranks) > 1:
        ranks = f"{ranks_in_words(first.ranks)}; to {ranks_in_words(last.ranks)}"
    each = brief_size(first.numel * parameter.itemsize)
    padding = brief_size(first.padding * parameter.itemsize) if first.padding else ""
    return Run(tuple(run), (ranks, *spans, each, padding))


def _along(run: Sequence[Block], dim: int, size: int) -> str:
    first, last = (spans_in_words(block.part[dim], size) for block in (run[0], run[-1]))
    return first if first == last else f"{run[0].shape[dim]} each: {first} to {last}"
