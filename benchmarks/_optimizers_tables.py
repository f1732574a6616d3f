"""Tables of an ``optimizers`` document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median, quantiles
from typing import Any

from _report import Table

TITLES = {
    "ours-adamw": "torch AdamW, fused",
    "fsdp2-adamw": "torch AdamW, fused",
    "ours-adamw8bit": "shardwise AdamW8bit",
    "fsdp2-adamw8bit": "torchao AdamW8bit",
    "ours-muon": "shardwise Muon",
    "fsdp2-muon": "muon-fsdp2",
    "ours-lion": "shardwise Lion",
    "fsdp2-lion": "lion-pytorch",
    "ours-adafactor": "shardwise Adafactor",
    "ours-sgd": "torch SGD, momentum",
    "fsdp2-sgd": "torch SGD, momentum",
}
"""Contenders, by what shards the model and what ``shardwise train`` calls the optimizer."""

MODELS = {"ours": "shardwise", "fsdp2": "torch FSDP2"}
ADAMW = "fsdp2-adamw"
LAST = 50  # steps whose mean loss counts


def split(name: str) -> tuple[str, str]:
    """Return what shards the model of a contender, and the kind of its optimizer."""
    sharded_by, _, kind = name.partition("-")
    return sharded_by, kind


def optimizers_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of each case of steps, and one of the losses of each model."""
    tables = [_steps(case) for case in content["cases"] if case["part"] == "steps"]
    losses: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in content["cases"]:
        if case["part"] == "loss":
            key = tuple(case[name] for name in ("ranks", "params", "tokens", "lr", "steps"))
            losses.setdefault(key, []).append(case)
    return [*tables, *map(_losses, losses.values())]


def differences(case: Mapping[str, Any]) -> list[str]:
    """Name the kinds of optimizers of torch whose losses depend on what shards the model.

    Both runtimes reduce gradients of two ranks alike, and run the same optimizer.
    """
    if case["part"] != "loss" or case["ranks"] != 2:
        return []
    losses = case["losses"]
    both = [kind for kind in ("adamw", "sgd") if {f"ours-{kind}", f"fsdp2-{kind}"} <= set(losses)]
    return [kind for kind in both if losses[f"ours-{kind}"] != losses[f"fsdp2-{kind}"]]


def _steps(case: Mapping[str, Any]) -> Table:
    table = Table(
        f"A step of the optimizer: {case['numel'] / 1e6:.1f} M parameters, "
        f"{case['ranks']} ranks, fp32, ZeRO-3",
        [
            *("optimizer", "sharded by", "ms", "quartiles", "x AdamW", "x peer"),
            *("bytes of states", "MiB of a step"),
        ],
    )
    seconds: Mapping[str, Sequence[float]] = case["seconds"]
    for name, turns in seconds.items():
        low, middle, high = (1e3 * each for each in quantiles(turns, n=4))
        sharded_by, kind = split(name)
        peer = f"fsdp2-{kind}"
        held, own = case["state_bytes"][name], case["shard_numel"][name]
        table.rows.append(
            [
                TITLES[name],
                MODELS[sharded_by],
                f"{middle:.1f}",
                f"{low:.1f} to {high:.1f}",
                _ratio(turns, seconds.get(ADAMW)),
                _ratio(turns, seconds.get(peer)) if name != peer else "",
                f"{max(h / o for h, o in zip(held, own, strict=True)):.2f}",
                f"{max(case['step_bytes'][name]) / 2**20:.1f}",
            ]
        )
    turns_each = len(next(iter(seconds.values())))
    table.notes += [
        f"Medians of {turns_each} steps, of the slowest rank; contenders take turns. AdamW is "
        "torch's, fused, on FSDP2; a peer has the same kind of optimizer, on FSDP2.",
        "Bytes of states are those of a parameter's element. The last column is the memory of a "
        "rank that a step takes for as long as it runs, beside parameters, gradients and states.",
    ]
    return table


def _ratio(mine: Sequence[float], theirs: Sequence[float] | None) -> str:
    if theirs is None:
        return ""
    return f"{median(m / t for m, t in zip(mine, theirs, strict=True)):.2f}"


def _losses(cases: Sequence[Mapping[str, Any]]) -> Table:
    first = cases[0]
    steps = first["steps"]
    table = Table(
        f"Loss after {steps} steps: {first['numel'] / 1e6:.1f} M parameters, "
        f"{first['ranks']} ranks, ZeRO-3, {first['tokens']} tokens a step",
        ["optimizer", "sharded by", "lr", "loss", "against AdamW"],
    )
    for name in first["losses"]:
        mine = [_last(case["losses"][name]) for case in cases]
        peers = [_last(case["losses"][ADAMW]) for case in cases if ADAMW in case["losses"]]
        apart = [f"{m / t - 1:+.1%}" for m, t in zip(mine, peers, strict=True)] if peers else []
        table.rows.append(
            [
                TITLES[name],
                MODELS[split(name)[0]],
                f"{first['rates'][name]:g}",
                ", ".join(f"{each:.3f}" for each in mine),
                ", ".join(apart) if name != ADAMW else "",
            ]
        )
    several = " Several figures in a cell are of several seeds." if len(cases) > 1 else ""
    table.notes.append(f"Means of the last {min(LAST, steps)} steps.{several}")
    found = {kind for case in cases for kind in differences(case)}
    table.notes += [f"Losses of torch's {kind} DIFFER between runtimes." for kind in sorted(found)]
    return table


def _last(losses: Sequence[float]) -> float:
    return mean(losses[-LAST:])
