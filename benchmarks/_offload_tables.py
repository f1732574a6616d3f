"""Tables of an ``offload`` document."""

from __future__ import annotations

from statistics import median
from typing import Any

from _report import Table

TITLES = {"memory": "states in memory, no limit", "disk": "states on a disk"}
AIM = 0.6  # of the speed with states in memory


def offload_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def speed(case: dict[str, Any]) -> float:
    """The median over turns of the speed with states on a disk by that in memory."""
    seconds = case["seconds"]
    return median(m / d for m, d in zip(seconds["memory"], seconds["disk"], strict=True))


def wrong(case: dict[str, Any]) -> str | None:
    """Tell what is worse than it may be, or return ``None``."""
    found = [] if speed(case) >= AIM else [f"{speed(case):.2f} x the speed with states in memory"]
    if case["digests"]["memory"] != case["digests"]["disk"]:
        found.append("parameters differ")
    return "; ".join(found) or None


def _table(case: dict[str, Any]) -> Table:
    table = Table(
        f"{case['numel'] / 1e6:.0f} M parameters in bf16 with fp32 masters, AdamW, "
        f"{case['ranks']} ranks, {case['tokens']} tokens a rank and step",
        ["contender", "step s", "fastest s", "slowest s", "speed", "all ranks GiB"],
    )
    for name, seconds in case["seconds"].items():
        share = 1.0 if name == "memory" else speed(case)
        times = [f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))]
        peak = f"{case['peak'][name] / 2**30:.2f}"
        table.rows.append([TITLES[name], *times, f"{share:.2f}", peak])
    turns = len(next(iter(case["seconds"].values())))
    kept, limit = case["kept"], case["limit"]
    table.notes.append(
        f"Medians of {turns} steps; contenders take turns. States and masters are "
        f"{kept / 2**30:.2f} GiB; the control group of the ranks with states on a disk may use "
        f"{limit / 2**30:.2f} GiB, page cache included: states are {kept / limit:.1f} x as much. "
        "The last column is the peak of that group, and the PSS between steps of the others."
    )
    same = case["digests"]["memory"] == case["digests"]["disk"]
    table.notes.append(f"Parameters after all steps: {'equal bit for bit' if same else 'differ'}.")
    return table
