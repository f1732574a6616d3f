"""Tables of a ``plan_memory`` document.

Glibc's heap keeps what is freed. The shards and the optimizer's states lie between the tensors that
come and go in a step, so that a free part often does not fit the next tensor. This slack is taken
to be one fraction of the tensors that come and go in the heap at the peak. It is the mean over the
first :data:`FITTED` cases, and the others are predicted with it. Memory that ranks share is none of
the heap.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from _report import Table

FITTED = 3
_MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: a preset of ``_models.py``, or of ``shardwise plan``.
        size: tokens of a sequence; for images, their number in a batch.
        mesh: of ranks.
        strategy: by name.
        dtype: of forward and backward.
        transport: as for ``fully_shard``.
        checkpointing: what is recomputed, by name.
        accumulate: microbatches of a step.
    """

    model: str
    size: int
    mesh: str
    strategy: str = "full"
    dtype: str = "fp32"
    transport: str = "shm"
    checkpointing: str = "none"
    accumulate: int = 1

    def label(self) -> str:
        """Name the case in a table."""
        what = "images" if self.model.startswith("vit") else "tokens"
        parts = [self.model, f"{self.size} {what}", self.dtype, self.strategy, self.transport]
        if self.checkpointing != "none":
            parts.append(f"{self.checkpointing} checkpointing")
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} microbatches")
        return ", ".join(parts)


def passing(case: dict[str, Any]) -> int:
    """Return the bytes of a plan's peak that glibc allocates, and that do not stay for ever."""
    predicted = case["predicted"]
    stays = predicted["parameters"] + predicted["optimizer"]
    if case["case"]["transport"] == "shm" and len(case["ranks"]) > 1:
        stays += predicted["full_parameters"] + predicted["transport"]
    return int(predicted["peak"] - stays)


def slack(cases: list[dict[str, Any]]) -> float:
    """Fit the slack: the mean of what ranks hold more than planned, by what comes and goes."""
    return statistics.mean(
        (rank["peak"] - rank["base"] - case["predicted"]["peak"]) / passing(case)
        for case in cases
        for rank in case["ranks"]
    )


def plan_memory_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table with a row for each case: that of the rank that is furthest from its plan."""
    cases = content["cases"]
    fraction = slack(cases[:FITTED])
    columns = ["configuration", "mesh", "bare", "plan", "slack", "predicted", "measured", "ratio"]
    shown = Table("PSS of a rank at its peak, MiB", columns)
    ratios = []
    for number, case in enumerate(cases):
        room = fraction * passing(case)
        added = case["predicted"]["peak"] + room
        rank = max(case["ranks"], key=lambda each: abs((each["base"] + added) / each["peak"] - 1))
        total = rank["base"] + added
        ratio = total / rank["peak"]
        if number >= FITTED:
            ratios.append(ratio)
        figures = (rank["base"], case["predicted"]["peak"], room, total, rank["peak"])
        shown.rows.append(
            [
                f"{Case(**case['case']).label()}{' (fitted)' if number < FITTED else ''}",
                case["case"]["mesh"],
                *(f"{figure / _MIB:,.0f}" for figure in figures),
                f"{ratio:.3f}",
            ]
        )
    shown.notes.append(
        f"slack: {100 * fraction:.1f} % of the tensors that come and go in the heap, "
        f"fitted on the first {min(FITTED, len(cases))} rows."
    )
    if ratios:
        off = [abs(ratio - 1) for ratio in ratios]
        shown.notes.append(
            f"The other {len(off)}: {sum(each <= 0.05 for each in off)} within 5 %, "
            f"{100 * statistics.median(off):.1f} % off in the median, {100 * max(off):.1f} % at "
            "most."
        )
    return [shown]
