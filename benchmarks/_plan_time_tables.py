"""Tables of a ``plan_time`` document.

Other programs only add to the seconds of a step, so that the lower quartile of a round counts. Each
round has its own calibration; the error of a case is the median over rounds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from _report import Table
from shardwise.frontends.strategies import Strategy, WantedMesh
from shardwise.insight.planning.settings import Settings


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: a preset of ``_models.py``.
        tokens: of a rank and step, in one sequence.
        mesh: of ranks.
        strategy: by name.
        dtype: of forward and backward.
        transport: as for ``fully_shard``.
        gbit: speed of the link between two hosts; 0: all ranks are on one.
    """

    model: str
    tokens: int
    mesh: str
    strategy: str = "full"
    dtype: str = "fp32"
    transport: str = "auto"
    gbit: float = 0.0

    @property
    def settings(self) -> Settings:
        """What to plan for."""
        mesh = WantedMesh.parse(self.mesh)
        return Settings(
            mesh=mesh,
            strategy=Strategy(self.strategy),
            batch_size=1,
            seq_length=self.tokens,
            param_dtype=None if self.dtype == "fp32" else self.dtype,
            transport=self.transport,
            ranks_per_host=mesh.size // (2 if self.gbit else 1),
        )

    @property
    def link(self) -> str | None:
        """The link between hosts, by name."""
        return f"ethernet-{self.gbit:g}" if self.gbit else None


def plan_time_tables(document: dict[str, Any]) -> list[Table]:
    """Return the comparison of predicted steps with real ones."""
    columns = ["case", "ranks", "measured", "predicted", "error", "of rounds", "bound by"]
    found = Table("Seconds of a step", columns)
    errors = []
    for each in document["cases"]:
        case = Case(**each["case"])
        reals = [statistics.quantiles(one["steps"], n=4)[0] for one in each["rounds"]]
        predicted = [one["predicted"]["seconds"] for one in each["rounds"]]
        off = [found / real - 1 for found, real in zip(predicted, reals, strict=True)]
        errors.append(statistics.median(off))
        where = f"two hosts, {case.gbit:g} Gbit/s" if case.gbit else case.transport
        words = f"{case.model}, {case.tokens} tokens, {case.dtype}, {case.strategy}, {where}"
        found.rows.append(
            [
                words,
                str(case.settings.mesh),
                f"{1e3 * statistics.median(reals):,.0f} ms",
                f"{1e3 * statistics.median(predicted):,.0f} ms",
                f"{100 * errors[-1]:+.1f} %",
                f"{100 * min(off):+.1f} to {100 * max(off):+.1f} %",
                each["rounds"][0]["predicted"]["bound_by"],
            ]
        )
    sizes = [100 * abs(error) for error in errors]
    found.notes.append(
        f"Error: {statistics.median(sizes):.1f} % in the median, {max(sizes):.1f} % at most."
    )
    return [found]
