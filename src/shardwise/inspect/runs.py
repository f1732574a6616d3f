"""Blocks in a table, runs of many like ones as one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.inspect.report import ParameterReport
from shardwise.inspect.tiling import Block
from shardwise.inspect.words import ranks_in_words, spans_in_words
from shardwise.units import brief_size

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
