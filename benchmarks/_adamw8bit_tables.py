"""Tables of an ``adamw8bit`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table

TITLES = {
    "adamw": "torch AdamW, fused",
    "ours": "shardwise AdamW8bit",
    "torchao": "torchao AdamW8bit",
    "adamw-foreach": "torch AdamW, foreach",
}
LAST = 50  # steps whose mean loss counts


def adamw8bit_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of steps and states, and one of losses, where they were measured."""
    cases = content["cases"]
    steps = [case for case in cases if case["part"] == "steps"]
    losses = [case for case in cases if case["part"] == "loss"]
    return [*([_steps(steps)] if steps else []), *([_losses(losses)] if losses else [])]


def _steps(cases: list[dict[str, Any]]) -> Table:
    table = Table(
        "A step of the optimizer, and its states",
        [
            *("optimizer", "parameters", "ms", "quartiles", "x fused AdamW", "x torchao"),
            *("bytes of states a parameter", "x fp32"),
        ],
    )
    for case in cases:
        seconds, held = case["seconds"], case["state_bytes"]
        for name, turns in seconds.items():
            low, middle, high = (1e3 * each for each in statistics.quantiles(turns, n=4))
            table.rows.append(
                [
                    TITLES[name],
                    f"{case['numel'] / 1e6:.1f} M",
                    f"{middle:.0f}",
                    f"{low:.0f} to {high:.0f}",
                    _ratio(turns, seconds["adamw"]),
                    _ratio(turns, seconds["torchao"]) if "torchao" in seconds else "",
                    f"{held[name] / case['numel']:.2f}",
                    f"{held[name] / held['adamw']:.3f}",
                ]
            )
    return table


def _ratio(mine: list[float], theirs: list[float]) -> str:
    return f"{statistics.median(m / t for m, t in zip(mine, theirs, strict=True)):.2f}"


def _losses(cases: list[dict[str, Any]]) -> Table:
    steps = len(cases[0]["losses"]["adamw"])
    table = Table(
        f"Loss of {steps} steps, trained on the standard library",
        [
            *("optimizer", "parameters", "tokens a step", f"mean of the last {LAST}"),
            *("x fp32", "mean of all", "x fp32"),
        ],
    )
    for case in cases:
        peer = case["losses"]["adamw"]
        for name, mine in case["losses"].items():
            last, all_steps = statistics.mean(mine[-LAST:]), statistics.mean(mine)
            table.rows.append(
                [
                    TITLES[name],
                    f"{case['numel'] / 1e6:.1f} M",
                    str(case["tokens"]),
                    f"{last:.4f}",
                    f"{last / statistics.mean(peer[-LAST:]):.4f}",
                    f"{all_steps:.4f}",
                    f"{all_steps / statistics.mean(peer):.4f}",
                ]
            )
    return table
