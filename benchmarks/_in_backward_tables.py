"""Tables of an ``in_backward`` document, and the check of what a step in backward may take."""

from __future__ import annotations

from typing import Any

from _memory_tables import memory_tables
from _report import Table
from _step_tables import disagreement, ratio, step_tables

CONTENDER = "ours-in-backward"
LEAST_SAVED = 0.80
"""Of FSDP2's peak PSS, a step in backward may take this much."""


def in_backward_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of memory and one of time for each case."""
    return [
        *memory_tables({"cases": [case["memory"] for case in content["cases"]]}),
        *step_tables({"cases": [case["time"] for case in content["cases"]]}),
    ]


def too_much(case: dict[str, Any]) -> str | None:
    """Tell what is worse than it may be, or return ``None``."""
    pss = {name: found["pss"] for name, found in case["memory"]["contenders"].items()}
    saved = pss[CONTENDER] / pss["fsdp2"]
    found = [f"peak PSS is {saved:.2f} x FSDP2's"] if saved > LEAST_SAVED else []
    slower = float(ratio(case["time"], CONTENDER, "fsdp2"))
    found += [f"a step takes {slower:.2f} x FSDP2's time"] if slower > 1.0 else []
    wrong = disagreement(case["time"])
    return "; ".join([*found, *([wrong] if wrong else [])]) or None
