"""Tables of an ``offload`` document."""

from __future__ import annotations

from statistics import median
from typing import Any

from _report import Table

TITLES = {
    "memory": "everything in memory, no limit",
    "disk": "states on a disk",
    "all": "states and parameters on a disk",
}
AIM = 0.6  # of the speed with everything in memory


def offload_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def speed(case: dict[str, Any], name: str) -> float:
    """The median over turns of the speed of a contender by that with everything in memory."""
    seconds = case["seconds"]
    return median(m / d for m, d in zip(seconds["memory"], seconds[name], strict=True))


def _limits(case: dict[str, Any]) -> dict[str, int]:
    """The limit of each contender that has one, in bytes."""
    limits: dict[str, int] = case["limits"] if "limits" in case else {"disk": case["limit"]}
    return limits


def wrong(case: dict[str, Any]) -> str | None:
    """Tell what is worse than it may be, or return ``None``."""
    found = []
    for name in _limits(case):
        if speed(case, name) < AIM:
            share = f"{speed(case, name):.2f} x the speed with everything in memory"
            found.append(f"{TITLES[name]}: {share}")
        if case["digests"]["memory"] != case["digests"][name]:
            found.append(f"{TITLES[name]}: parameters differ")
    return "; ".join(found) or None


def _table(case: dict[str, Any]) -> Table:
    table = Table(
        f"{case['numel'] / 1e6:.0f} M parameters in bf16 with fp32 masters, AdamW, "
        f"{case['ranks']} ranks, {case['tokens']} tokens a rank and step",
        ["contender", "step s", "fastest s", "slowest s", "speed", "limit GiB", "all ranks GiB"],
    )
    limits = _limits(case)
    for name, seconds in case["seconds"].items():
        share = 1.0 if name == "memory" else speed(case, name)
        times = [f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))]
        limit = f"{limits[name] / 2**30:.2f}" if name in limits else "none"
        peak = f"{case['peak'][name] / 2**30:.2f}"
        table.rows.append([TITLES[name], *times, f"{share:.2f}", limit, peak])
    turns = len(next(iter(case["seconds"].values())))
    kept = {"disk": case["kept"], "all": case["kept"] + 2 * case["numel"]}
    sizes = [
        f"{kept[name] / 2**30:.2f} GiB, {kept[name] / limit:.1f} x as much as it may use"
        for name, limit in limits.items()
    ]
    table.notes.append(
        f"Medians of {turns} steps; contenders take turns. The limit is for all ranks of a "
        "contender together, everything included, also page cache. What it keeps on the disk is "
        f"{'; and '.join(sizes)}. The last column is the peak under the limit, and without one the "
        "PSS between steps."
    )
    same = len(set(map(str, case["digests"].values()))) == 1
    table.notes.append(f"Parameters after all steps: {'equal bit for bit' if same else 'differ'}.")
    return table
