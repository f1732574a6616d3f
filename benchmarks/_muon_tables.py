"""Tables of a ``muon`` document."""

from __future__ import annotations

from statistics import median
from typing import Any

from _report import Table

TITLES = {
    "ours": "shardwise",
    "every": "torch.optim.Muon, every rank does all",
    "muon-fsdp2": "muon-fsdp2 on FSDP2",
    "torch": "torch.optim.Muon on FSDP2",
}
CONTENDERS = tuple(TITLES)
AIM, AIM_RANKS = 0.35, 4  # of the time of every rank doing all; from so many ranks on
EXACT = 1e-5  # the largest difference of weights that rounding explains


def muon_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def too_slow(case: dict[str, Any]) -> bool:
    """Whether ours takes more than its share, or computes something else."""
    share = _ratio(case, "ours")
    misses = case["ranks"] >= AIM_RANKS and share is not None and share > AIM
    return misses or (case["difference"] or 0.0) > EXACT


def _ratio(case: dict[str, Any], name: str) -> float | None:
    """The median over turns of a contender's time by that of every rank doing all."""
    seconds = case["seconds"]
    if "every" not in seconds:
        return None
    return median(mine / all_ for mine, all_ in zip(seconds[name], seconds["every"], strict=True))


def _table(case: dict[str, Any]) -> Table:
    table = Table(
        f"A step of Muon on the hidden matrices of {case['params']} ({case['matrices']} of them, "
        f"{case['numel'] / 1e6:.0f} M elements), {case['ranks']} ranks, "
        f"{case['ns_steps']} iterations",
        ["contender", "step s", "fastest s", "slowest s", "x every rank"],
    )
    for name, seconds in case["seconds"].items():
        ratio = _ratio(case, name)
        times = [f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds))]
        table.rows.append([TITLES[name], *times, "-" if ratio is None else f"{ratio:.3f}"])
    turns = len(next(iter(case["seconds"].values())))
    table.notes.append(f"Medians of {turns} steps; contenders take turns.")
    if case["difference"] is not None:
        table.notes.append(
            f"Largest difference between our weights and those of every rank: "
            f"{case['difference']:.1e}."
        )
    return table
