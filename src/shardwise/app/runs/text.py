"""Runs beside each other, as a table for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.base.units import printable

_WIDEST = 40  # columns of a value


@dataclass(frozen=True)
class Comparison:
    """What runs have come to, and where their settings differ.

    Attributes:
        results: by run, what it has come to: state, step, losses, speed, memory.
        differing: by setting, its value in each run; None where a run does not have it.
        same: how many settings are the same in all runs.
    """

    results: Mapping[str, Mapping[str, Any]]
    differing: Mapping[str, Sequence[Any]]
    same: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"results": self.results, "differing": self.differing, "same": self.same}

    def __str__(self) -> str:
        names = list(self.results)
        rows = [["", *names]]
        kinds = dict.fromkeys(kind for result in self.results.values() for kind in result)
        rows += [
            [_shown(kind), *(_shown(self.results[n].get(kind)) for n in names)] for kind in kinds
        ]
        rows.append([])
        rows += [[_shown(name), *map(_shown, values)] for name, values in self.differing.items()]
        if not self.differing:
            rows.append([f"all {self.same} settings are the same"])
        elif self.same:
            rows.append([f"{self.same} other settings are the same"])
        # Names of runs, settings and metrics may be as hostile as their values.
        rows = [[printable(cell) for cell in row] for row in rows]
        widths = [
            max((len(row[at]) for row in rows if at < len(row) and len(row) > 1), default=0)
            for at in range(len(names) + 1)
        ]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows
        )
        return "\n".join(lines)


def compared(runs: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare runs.

    Args:
        runs: what each says; see :meth:`.snapshot.RunReader.read`.
    """
    names = _names(runs)
    settings = dict.fromkeys(name for run in runs for name in run["config"])
    values = {name: [run["config"].get(name) for run in runs] for name in settings}
    differing = {
        name: found for name, found in values.items() if any(v != found[0] for v in found[1:])
    }
    results = {name: _result(run) for name, run in zip(names, runs, strict=True)}
    return Comparison(results, differing, len(settings) - len(differing))


def _names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names that tell the runs apart: that of the folder, or its path."""
    names = [run["name"] for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run["folder"] for run in runs]
    distinct = len(set(paths)) == len(paths)
    return paths if distinct else [f"{path} ({at})" for at, path in enumerate(paths, start=1)]


def _result(run: Mapping[str, Any]) -> dict[str, Any]:
    latest, curves = run["latest"], run["curves"]["values"]
    session = run["sessions"][-1] if run["sessions"] else {}
    found = {
        "state": run["state"],
        "model": run["model"],
        "ranks": session.get("world_size"),
        "step": latest.get("step"),
        "loss": latest.get("loss"),
    }
    if "validation_loss" in curves:
        curve = curves["validation_loss"]
        lows = [low for low in curve.get("low", curve["mean"]) if low is not None]
        found["best validation_loss"] = min(lows, default=None)
    speed = [name for name in latest if name.endswith("_per_s")]
    names = [*speed, *(name for name in ("memory_mib", "mfu") if name in latest)]
    return {**found, **{name: latest[name] for name in names}}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
