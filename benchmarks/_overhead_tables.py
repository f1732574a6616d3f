"""Tables of an ``overhead`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {"ours": "shardwise", "fsdp2": "torch FSDP2"}


def overhead_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of steps and one of building, with a row for each world size and contender."""
    groups = content["cases"][0]["groups"]
    table = Table(
        f"Overhead of a group and step, {groups} tiny groups (µs, over the unsharded step)",
        ["contender", "ranks", "µs a group", "quartiles", "x FSDP2"],
    )
    for case in content["cases"]:
        per_round = {name: overheads(case, name) for name in TITLES}
        for name, title in TITLES.items():
            low, middle, high = statistics.quantiles(per_round[name], n=4)
            ratio = statistics.median(
                mine / theirs
                for mine, theirs in zip(per_round[name], per_round["fsdp2"], strict=True)
            )
            table.rows.append(
                [
                    title,
                    str(case["ranks"]),
                    f"{middle:.0f}",
                    f"{low:.0f} to {high:.0f}",
                    f"{ratio:.2f}",
                ]
            )
    return [table, *_build_table(content["cases"])]


def _build_table(cases: list[dict[str, Any]]) -> list[Table]:
    """Make the table of the time that ``fully_shard`` takes, where it was measured."""
    measured = [case for case in cases if "build" in case]
    if not measured:
        return []
    table = Table(
        f"fully_shard of {measured[0]['build']['groups']} tiny groups (s)",
        ["contender", "ranks", "s", "quartiles", "x FSDP2"],
    )
    for case in measured:
        seconds = case["build"]["seconds"]
        for name, title in TITLES.items():
            low, middle, high = statistics.quantiles(seconds[name], n=4)
            ratio = statistics.median(
                mine / theirs for mine, theirs in zip(seconds[name], seconds["fsdp2"], strict=True)
            )
            table.rows.append(
                [
                    title,
                    str(case["ranks"]),
                    f"{middle:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{ratio:.2f}",
                ]
            )
    return [table]


def overheads(case: dict[str, Any], name: str) -> list[float]:
    """Return the microseconds per group beyond the floor, for each round."""
    return [
        1e6 * (statistics.median(turn) - statistics.median(floor)) / case["groups"]
        for turn, floor in zip(case["seconds"][name], case["seconds"]["floor"], strict=True)
    ]
