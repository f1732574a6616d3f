"""The tables of ``frontier`` documents: loss and bytes of wires and of DiLoCo."""

from __future__ import annotations

from typing import Any

from _report import Table

BESIDE = "hybrid:fp32"


def kind_of(name: str) -> str:
    """Return ``hybrid``, ``full``, ``ddp`` or ``diloco``."""
    kind = name.partition(":")[0]
    return kind if kind in ("hybrid", "full", "ddp") else "diloco"


def title_of(name: str) -> str:
    """Return what a table calls a contender."""
    kind = kind_of(name)
    wire = name.removeprefix(f"{kind}:")
    if kind == "ddp":
        return f"torch DDP, {'bf16 hook' if wire == 'bf16' else wire}"
    if kind != "diloco":
        return f"{kind}, {wire.replace(',', ', ').replace('error-feedback', 'EF')}"
    settings = dict(part.split("=", 1) for part in name.split(",") if part)
    return f"DiLoCo, H = {settings.get('every', 50)}, {settings.get('wire', 'fp32')}"


def losses_beside(case: dict[str, Any], name: str) -> list[float]:
    """Return a contender's losses, divided by those of fp32, by seed."""
    found = case["contenders"]
    pairs = zip(found[name]["losses"], found[BESIDE]["losses"], strict=True)
    return [one / other for one, other in pairs]


def bytes_beside(case: dict[str, Any], name: str) -> float:
    """Return the bytes of a contender, divided by those of fp32."""
    found = case["contenders"]
    return float(found[name]["sent"] / found[BESIDE]["sent"])


def frontier_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def _table(case: dict[str, Any]) -> Table:
    settings = case["settings"]
    seeds = range(settings["seeds"])
    table = Table(
        f"{settings['replicas']} hosts, {settings['steps']} steps from random weights",
        ["training", "bytes a step", "x fp32", *(f"seed {seed}" for seed in seeds), "loss"],
    )
    for name, found in case["contenders"].items():
        ratios = losses_beside(case, name)
        table.rows.append(
            [
                title_of(name),
                f"{found['sent']:,.0f}",
                f"{bytes_beside(case, name):.4f}",
                *(f"{ratio:.4f}" for ratio in ratios),
                f"{sum(found['losses']) / len(ratios):.4f}",
            ]
        )
    table.notes.append(
        "bytes: what a host sends, the mean over all steps; columns of seeds: loss on text that "
        "was held out, divided by that of hybrid sharding in fp32"
    )
    return table
