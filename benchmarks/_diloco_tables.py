"""Tables of a ``diloco`` document."""

from __future__ import annotations

from typing import Any

from _report import Table

SYNCHRONOUS = "synchronous"


def loss_ratio(case: dict[str, Any], name: str) -> float:
    """A contender's loss on text that was held out, beside that of synchronous training."""
    found = case["contenders"]
    return float(found[name]["judged"] / found[SYNCHRONOUS]["judged"])


def bytes_ratio(case: dict[str, Any], name: str) -> float:
    """How many times fewer bytes have crossed between replicas, the flush at the end included."""
    found = case["contenders"]
    return float(_bytes(found[SYNCHRONOUS]) / _bytes(found[name]))


def diloco_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case, a row for each contender."""
    return [_table(case) for case in content["cases"]]


def _table(case: dict[str, Any]) -> Table:
    settings = case["settings"]
    tokens = settings["steps"] * settings["ranks"] * settings["batch"] * settings["length"]
    warmup = settings.get("outer_warmup")  # older documents have none
    risen = f", momentum rises over {warmup} rounds" if warmup else ""
    table = Table(
        f"{settings['model']}, {settings['replicas']} replicas on {settings['ranks']} ranks, "
        f"{settings['steps']} steps, {tokens / 1e6:.2f} M tokens; outer rate "
        f"{settings['outer_lr']}{risen}",
        ["contender", "loss", "x synchronous", "MB between replicas", "fewer bytes"],
    )
    for name, found in case["contenders"].items():
        kind, _, momentum = name.partition(":")
        title = name
        if name != SYNCHRONOUS:
            title = f"DiLoCo, H = {settings['every']}, {kind}, momentum {momentum or 0.9}"
        table.rows.append(
            [
                title,
                f"{found['judged']:.4f}",
                f"{loss_ratio(case, name):.4f}",
                f"{_bytes(found) / 1e6:.2f}",
                f"{bytes_ratio(case, name):.1f} x",
            ]
        )
    table.notes.append(
        "loss: nats per token on 512 sequences that were held out, of the outer parameters; bytes: "
        "payload of all ranks"
    )
    if settings["start"]:
        table.notes.append(
            f"all start from one model, trained synchronously for {settings['start']} steps"
        )
    return table


def _bytes(found: dict[str, Any]) -> int:
    return int(found["sent"] + found["sent_at_end"])
