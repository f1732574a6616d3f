"""Tables of a ``checkpoint_stall`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {
    "steps": "steps alone",
    "sync": "shardwise, save",
    "async": "shardwise, async_save",
    "dcp": "torch DCP, async_save",
}
WAYS = tuple(TITLES)
MIB = 2**20


def stall_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each way to save."""
    return [_table(case) for case in content["cases"]]


def _table(case: dict[str, Any]) -> Table:
    turns = case["turns"]
    table = Table(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{12 * case['numel'] / 1e9:.2f} GB saved in {case['steps']} steps",
        ["way", "stall s", "quartiles s", "x save", "in all s", "quartiles s", "extra MiB a rank"],
    )
    stalls = {way: [_slowest(turn, "stall") for turn in turns[way]] for way in WAYS}
    alone = [_slowest(turn, "seconds") for turn in turns["steps"]]
    quiet = statistics.median(_slowest(turn, "peak") for turn in turns["steps"])
    for way in WAYS[1:]:
        shares = [own / sync for own, sync in zip(stalls[way], stalls["sync"], strict=True)]
        seconds = [_slowest(turn, "seconds") for turn in turns[way]]
        costs = [mine - base for mine, base in zip(seconds, alone, strict=True)]
        extra = statistics.median(_slowest(turn, "peak") for turn in turns[way]) - quiet
        table.rows.append(
            [
                TITLES[way],
                *_quartiles(stalls[way]),
                f"{statistics.median(shares):.2f}",
                *_quartiles(costs),
                f"{max(0.0, extra) / MIB:.0f}",
            ]
        )
    table.notes.append(
        f"{len(alone)} rounds, the slowest rank of each; {case['steps']} steps of "
        f"{case['tokens']} tokens a rank take {statistics.median(alone):.2f} s alone; ratios "
        "are medians of those within each round"
    )
    return table


def _quartiles(seconds: list[float]) -> tuple[str, str]:
    """The median, and what half of the rounds lie between."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle:.2f}", f"{low:.2f} to {high:.2f}"


def _slowest(turn: list[dict[str, float]], what: str) -> float:
    return max(rank[what] for rank in turn)
