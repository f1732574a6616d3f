"""Tables of a ``transport`` document."""

from __future__ import annotations

import statistics
from itertools import groupby
from typing import Any

from _report import Table

KINDS = {"one": "one tensor", "block": "a Llama block: 7 large and 2 tiny tensors"}


def transport_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each operation and kind, a row for each world size and size."""

    def place(case: dict[str, Any]) -> tuple[str, str]:
        return case["operation"], case["kind"]

    cases = sorted(content["cases"], key=lambda case: (*place(case), case["ranks"], case["bytes"]))
    return [_table(*key, list(group)) for key, group in groupby(cases, key=place)]


def _table(operation: str, kind: str, cases: list[dict[str, Any]]) -> Table:
    names = list(cases[0]["seconds"])
    table = Table(
        f"{operation}, {KINDS[kind]} (ms, median; fastest in brackets)",
        ["ranks, MiB", *names, *(f"ours / {name}" for name in names if name != "ours")],
    )
    for case in cases:
        ours = _turns(case, "ours")
        cells = [_cell(case["seconds"][name]) for name in names]
        ratios = [
            statistics.median(
                mine / theirs for mine, theirs in zip(ours, _turns(case, name), strict=True)
            )
            for name in names
            if name != "ours"
        ]
        size = f"{case['bytes'] / 2**20:g}"
        table.rows.append(
            [f"{case['ranks']}, {size}", *cells, *(f"{ratio:.2f}" for ratio in ratios)]
        )
    return table


def _turns(case: dict[str, Any], name: str) -> list[float]:
    """Median of each turn of a contender: turns of one round were taken one after the other."""
    return [statistics.median(turn) for turn in case["seconds"][name]]


def _cell(turns: list[list[float]]) -> str:
    every = [1000 * seconds for turn in turns for seconds in turn]
    return f"{statistics.median(every):.2f} ({min(every):.2f})"
