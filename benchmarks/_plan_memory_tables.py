"""Tables of a ``plan_memory`` document.

A process takes more than its tensors: holes in the heap, buffers of libraries. How many times as
much is the median over all ranks, which plans take as ``PROCESS_FACTOR``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from _report import Table

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
        measured: PSS at the peak, and its part of shared memory that no rank maps.
    """

    base: float
    measured: float


def _ranks(case: dict[str, Any]) -> list[_Rank]:
    return [
        _Rank(
            base=statistics.median(each["base"] for each in runs),
            measured=statistics.median(each["peak"] + each["unmapped"] for each in runs),
        )
        for runs in zip(*case["runs"], strict=True)
    ]


def factor(cases: list[dict[str, Any]]) -> float:
    """Return how many times its planned tensors a rank takes, in the median of all ranks."""
    return statistics.median(
        (rank.measured - rank.base) / case["predicted"]["peak"]
        for case in cases
        for rank in _ranks(case)
    )


def plan_memory_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table with a row for each case: that of the rank that is furthest from its plan."""
    cases = content["cases"]
    times = factor(cases)
    columns = ["configuration", "mesh", "bare", "tensors", "predicted", "measured", "ratio"]
    shown = Table("PSS of a rank at its peak, MiB", columns)
    off = []
    for case in cases:
        tensors = case["predicted"]["peak"]
        added = times * tensors
        rank = max(_ranks(case), key=lambda each: abs((each.base + added) / each.measured - 1))
        total = rank.base + added
        off.append(abs(total / rank.measured - 1))
        shown.rows.append(
            [
                Case(**case["case"]).label(),
                case["case"]["mesh"],
                *(f"{each / _MIB:,.0f}" for each in (rank.base, tensors, total, rank.measured)),
                f"{total / rank.measured:.3f}",
            ]
        )
    shown.notes.append(f"A rank takes {times:.2f} x its tensors in the median.")
    shown.notes.append(
        f"With that, {sum(each <= 0.05 for each in off)} of {len(off)} are within 5 %, "
        f"{100 * statistics.median(off):.1f} % off in the median, {100 * max(off):.1f} % at most."
    )
    return [shown]
