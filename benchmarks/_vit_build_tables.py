"""Tables of a ``vit_build`` document, and the check of what may be held."""

from __future__ import annotations

from typing import Any

from _memory import Formula
from _report import Table

ALLOWED = 1.05
"""A peak may take this much of its formula."""

COLUMNS = ["MiB a rank", "peak PSS", "formula", "x formula", "x whole parameters", "seconds"]


def vit_build_tables(content: dict[str, Any]) -> list[Table]:
    """Make one table for each case of a document."""
    return [_table(case) for case in content["cases"]]


def limits(case: dict[str, Any]) -> dict[str, int]:
    """Return the most that may be held in building and in a step, in bytes a rank."""
    expected = case["formula"]
    return {"build": sum(expected["build"].values()), "step": Formula(**expected["step"]).total}


def too_high(case: dict[str, Any]) -> str | None:
    """Tell where more is held than the formula allows, or return ``None``."""
    ratios = {what: case["measured"][what] / limit for what, limit in limits(case).items()}
    found = [f"{what} {ratio:.2f} x" for what, ratio in ratios.items() if ratio > ALLOWED]
    return ", ".join(found) or None


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f}"


def _table(case: dict[str, Any]) -> Table:
    expected, measured = case["formula"], case["measured"]
    names = {"build": "building", "step": "a step"}
    rows = [
        [
            names[what],
            _mib(measured[what]),
            _mib(limit),
            f"{measured[what] / limit:.2f}",
            f"{measured[what] / expected['whole']:.2f}",
            f"{measured[f'{what}_s']:.1f}",
        ]
        for what, limit in limits(case).items()
    ]
    build, step = expected["build"], Formula(**expected["step"])
    wrong = too_high(case)
    kept = "computed again" if case["checkpointing"] else "kept"
    pictures = f"{case['batch']} {'picture' if case['batch'] == 1 else 'pictures'} a rank"
    return Table(
        title=f"{case['model']} with {case['layers']} blocks, {expected['numel']:,} parameters, "
        f"{case['ranks']} ranks, {case['dtype']}",
        columns=COLUMNS,
        rows=rows,
        notes=[
            f"TOO HIGH: {wrong}" if wrong else "OK, no higher than the formula + 5 %",
            f"building: shards {_mib(build['shards'])} + the largest layer {_mib(build['layer'])}; "
            f"the whole parameters are {_mib(expected['whole'])}",
            f"a step: shards {_mib(step.shards)} + unsharded {_mib(step.unsharded)} + full "
            f"gradients {_mib(step.gradients)} + activations {_mib(step.activations)} "
            f"({pictures}, "
            f"activations {kept})",
            f"all ranks together held at most {_mib(case['ranks'] * measured['step'])}; groups: "
            f"{'blocks' if case['nested'] else 'one'}; transport: {case['transport']}; losses "
            f"{', '.join(f'{loss:.3f}' for loss in measured['losses'])}",
        ],
    )
