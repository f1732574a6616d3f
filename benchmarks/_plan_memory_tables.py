"""Tables of a ``plan_memory`` document.

Beside what is predicted of its memory, a rank holds some that no tensor stands for: above all, the
buffers that MKL keeps for matrix products in float32. For those of bfloat16, oneDNN keeps few. They
are taken to be one constant for float32, the mean over the first :data:`FITTED` cases, and the
others are predicted with it.
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


@dataclass(frozen=True)
class _Rank:
    """The medians of a rank over all runs, in bytes.

    Attributes:
        base: PSS before it has a model.
        pss: PSS at the peak.
        measured: the same, and its part of shared memory that no rank maps.
    """

    base: float
    pss: float
    measured: float


def _ranks(case: dict[str, Any]) -> list[_Rank]:
    return [
        _Rank(
            base=statistics.median(each["base"] for each in runs),
            pss=statistics.median(each["peak"] for each in runs),
            measured=statistics.median(each["peak"] + each["unmapped"] for each in runs),
        )
        for runs in zip(*case["runs"], strict=True)
    ]


def _planned(case: dict[str, Any]) -> int:
    """Return the bytes that a rank's memory comes to, its own and its part of what is shared."""
    return int(case["predicted"]["own"] + case["predicted"]["shared"])


def beside(cases: list[dict[str, Any]]) -> float:
    """Fit what a rank holds beside tensors: the mean of what ranks hold more than planned."""
    return statistics.mean(
        rank.measured - rank.base - _planned(case) for case in cases for rank in _ranks(case)
    )


def plan_memory_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table with a row for each case: that of the rank that is furthest from its plan."""
    cases = content["cases"]
    constant = beside(cases[:FITTED])
    columns = ["configuration", "mesh", "bare", "tensors", "own", "shared"]
    columns += ["predicted", "measured", "ratio"]
    shown = Table("PSS of a rank at its peak, MiB", columns)
    ratios, mapped = [], []
    for number, case in enumerate(cases):
        plan = case["predicted"]
        added = _planned(case) + (constant if case["case"]["dtype"] == "fp32" else 0)
        rank = max(_ranks(case), key=lambda each: abs((each.base + added) / each.measured - 1))
        total = rank.base + added
        ratio = total / rank.measured
        if number >= FITTED:
            ratios.append(ratio)
            mapped.append(max(abs((r.base + added) / r.pss - 1) for r in _ranks(case)))
        figures = (rank.base, plan["peak"], plan["own"], plan["shared"], total, rank.measured)
        shown.rows.append(
            [
                f"{Case(**case['case']).label()}{' (fitted)' if number < FITTED else ''}",
                case["case"]["mesh"],
                *(f"{figure / _MIB:,.0f}" for figure in figures),
                f"{ratio:.3f}",
            ]
        )
    shown.notes.append(
        f"{constant / _MIB:,.0f} MiB beside tensors with fp32, fitted on the "
        f"first {min(FITTED, len(cases))} rows."
    )
    if ratios:
        off = [abs(ratio - 1) for ratio in ratios]
        shown.notes.append(
            f"The other {len(off)}: {_summary(off)}. Against PSS without the shared memory that no "
            f"rank maps: {_summary(mapped)}."
        )
    return [shown]


def _summary(off: list[float]) -> str:
    return (
        f"{sum(each <= 0.05 for each in off)} within 5 %, "
        f"{100 * statistics.median(off):.1f} % off in the median, {100 * max(off):.1f} % at most"
    )
