"""The report as plain values, for JSON. ``docs/inspect.md`` tells what the fields mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.inspect.report import ParameterReport, RankTotals, Report
from shardwise.inspect.tiling import Tiling

VERSION = 1  # raised when a field changes its meaning or goes


def plain_report(report: Report, parameters: Sequence[ParameterReport]) -> dict[str, Any]:
    """A report, with some of its parameters. Those that are cut alike refer to one tiling.

    Totals and remarks are those of the whole model.
    """
    tilings = list(dict.fromkeys(each.tiling for each in parameters))
    told = {each.name for each in parameters}
    numbers = {tiling: number for number, tiling in enumerate(tilings)}
    return {
        "version": VERSION,
        "model": report.model,
        "mesh": {
            "names": list(report.grid.names),
            "shape": list(report.grid.shape),
            "ranks": list(report.grid.ranks),
        },
        "numel": report.numel,
        "nbytes": report.nbytes,
        "ranks": [_totals(each) for each in report.totals],
        "parameters": [_parameter(each, numbers[each.tiling]) for each in parameters],
        "tilings": [_tiling(each) for each in tilings],
        "remarks": [
            {
                "kind": each.kind,
                "text": each.text,
                "nbytes": each.nbytes,
                "parameters": list(each.parameters),
            }
            for each in report.remarks
        ],
        "values": None
        if report.values is None
        else {
            name: {str(rank): elements for rank, elements in held.items()}
            for name, held in report.values.items()
            if name in told
        },
    }


def _totals(each: RankTotals) -> dict[str, int]:
    return {
        "rank": each.rank,
        "parameters": each.parameters,
        "trainable": each.trainable,
        "replicated": each.replicated,
        "padding": each.padding,
        "estimated_gradients": each.gradients,
        "estimated_adam": each.optimizer,
    }


def _parameter(each: ParameterReport, tiling: int) -> dict[str, Any]:
    return {
        "name": each.name,
        "aliases": list(each.aliases),
        "shape": list(each.shape),
        "dtype": each.dtype,
        "itemsize": each.itemsize,
        "nbytes": each.nbytes,
        "trainable": each.trainable,
        "kind": each.kind.value,
        "group": each.group,
        "cut_dim": each.cut_dim,
        "placements": [list(pair) for pair in each.placements],
        "cut_along": [list(dims) for dims in each.cut_along],
        "tiling": tiling,
    }


def _tiling(tiling: Tiling) -> dict[str, Any]:
    return {
        "shape": list(tiling.shape),
        "blocks": [
            {
                "ranks": list(block.ranks),
                "spans": [[list(span) for span in spans] for spans in block.part],
                "numel": block.numel,
                "padding": block.padding,
            }
            for block in tiling.blocks
        ],
    }
