"""Tables of a ``checkpoint`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {"ours": "shardwise", "dcp": "torch DCP", "floor": "plain files"}
CONTENDERS = tuple(TITLES)
MIB = 2**20


def checkpoint_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender and direction."""
    return [_table(case) for case in content["cases"]]


def _table(case: dict[str, Any]) -> Table:
    table = Table(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{case['nbytes'] / 1e9:.2f} GB",
        ["contender", "s", "quartiles s", "GB/s", "x DCP", "x plain", "extra MiB a rank"],
    )
    for what in ("save", "load"):
        seconds = {
            name: [max(turn[f"{what}_s"]) for turn in case["turns"][name]] for name in TITLES
        }
        for name, title in TITLES.items():
            low, middle, high = statistics.quantiles(seconds[name], n=4)
            extra = max(max(turn[f"{what}_extra"]) for turn in case["turns"][name])
            table.rows.append(
                [
                    f"{title}, {what}",
                    f"{middle:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{case['nbytes'] / middle / 1e9:.2f}",
                    _speed(seconds[name], seconds["dcp"]),
                    _speed(seconds[name], seconds["floor"]),
                    f"{extra / MIB:.0f}",
                ]
            )
    rounds = len(case["turns"]["ours"])
    cache = "dropped from" if case["cold"] else "in"
    table.notes.append(
        f"{rounds} rounds, the slowest rank of each; files {cache} the page cache when they are "
        "loaded; ratios are of throughput, medians of those within each round"
    )
    return table


def _speed(mine: list[float], theirs: list[float]) -> str:
    """How many times the throughput of another."""
    ratios = [other / own for own, other in zip(mine, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f}"
