"""The summary of ``docs/benchmarks.md``: one row per measurement, beside torch's implementation.

Each row takes its figures from one case of one stored document, so a document that is measured
again changes its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _charts import OURS, Panel, draw
from _measured import overheads, peak, ratio, ratio_of, seconds_by_round, step_seconds

Case = dict[str, Any]
#: Ours and torch's of the same rounds, one value for each.
Beside = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Measurement:
    """A row of the summary.

    Attributes:
        what: what was measured, and where.
        result: the stored document.
        where: entries that the case has.
        read: takes both series out of the case.
        unit: of what ``read`` returns.
        decimals: to show.
    """

    what: str
    result: str
    where: dict[str, Any]
    read: Callable[[Case], Beside]
    unit: str = "s"
    decimals: int = 2

    def measured(self, results: Path) -> Beside:
        """Read the figures from a folder of documents.

        Raises:
            FileNotFoundError: the document is not there.
            StopIteration: no case of the document has the entries.
        """
        cases = json.loads((results / self.result).read_text())["cases"]
        return self.read(
            next(case for case in cases if all(case[k] == v for k, v in self.where.items()))
        )


def _step(case: Case) -> Beside:
    return step_seconds(case, "ours"), step_seconds(case, "fsdp2")


def _strategy(mine: str, theirs: str) -> Callable[[Case], Beside]:
    def read(case: Case) -> Beside:
        return seconds_by_round(case, mine), seconds_by_round(case, theirs)

    return read


def _overhead(case: Case) -> Beside:
    return overheads(case, "ours"), overheads(case, "fsdp2")


def _memory(case: Case) -> Beside:
    found = [peak(case, name) for name in ("ours", "fsdp2")]
    mine, theirs = (size / 2**20 for size in found if size)
    return [mine], [theirs]


def _checkpoint(what: str) -> Callable[[Case], Beside]:
    def read(case: Case) -> Beside:
        mine, theirs = ([max(turn[what]) for turn in case["turns"][n]] for n in ("ours", "dcp"))
        return mine, theirs

    return read


MEASUREMENTS = (
    Measurement(
        "Step, ZeRO-3: one host, 2 ranks",
        "2026-11-22-copies-34m.json",
        {"zero": 3},
        _step,
    ),
    Measurement(
        "Step, ZeRO-2: one host, 2 ranks",
        "2026-11-22-copies-34m.json",
        {"zero": 2},
        _step,
    ),
    Measurement(
        "Step, ZeRO-3: one host, 2 ranks, over gloo",
        "2026-11-21-gloo-step-time-34m.json",
        {"zero": 3, "ranks": 2, "dtype": "fp32"},
        _step,
    ),
    Measurement(
        "Step, ZeRO-3: two hosts, 4 ranks, 1 Gbit/s",
        "2026-11-22-own-loop-1-gbit.json",
        {},
        _strategy("full-own-loop", "fsdp2-full"),
    ),
    Measurement(
        "Step, hybrid: two hosts, 4 ranks, 1 Gbit/s",
        "2026-11-22-strategies-1-gbit.json",
        {},
        _strategy("hybrid", "fsdp2-hybrid"),
    ),
    Measurement(
        "Overhead per group, nothing to move: 1 rank",
        "2026-11-22-overhead.json",
        {"ranks": 1},
        _overhead,
        "µs",
        0,
    ),
    Measurement(
        "Peak memory per rank, ZeRO-3: 2 ranks, over gloo",
        "2026-11-21-gloo-memory-34m.json",
        {"zero": 3, "dtype": "fp32"},
        _memory,
        "MiB",
        0,
    ),
    Measurement(
        "Save a checkpoint, 1.78 GB: 2 ranks",
        "2026-11-21-checkpoint-cold.json",
        {},
        _checkpoint("save_s"),
    ),
    Measurement(
        "Load it from disk: 2 ranks",
        "2026-11-21-checkpoint-cold.json",
        {},
        _checkpoint("load_s"),
    ),
)


def table(results: Path) -> str:
    """Return the summary as a Markdown table.

    Args:
        results: folder of the documents.

    Raises:
        FileNotFoundError: a document is not there.
    """
    rows = ["| | Shardwise | torch | ratio |", "| --- | ---: | ---: | ---: |"]
    for each in MEASUREMENTS:
        found = each.measured(results)
        mine, theirs = (f"{median(values):.{each.decimals}f} {each.unit}" for values in found)
        link = f"[{each.what}](../benchmarks/results/{each.result})"
        rows.append(f"| {link} | {mine} | {theirs} | {ratio(*found)} |")
    return "\n".join(rows)


def draw_summary(results: Path, path: Path) -> None:
    """Draw the ratios of the summary as bars, beside a line at torch's 1.

    Args:
        results: folder of the documents.
        path: a file that ends in ``.svg`` or ``.png``; replaced only when it is complete.
    """
    bars = {each.what: (ratio_of(*each.measured(results)), OURS) for each in MEASUREMENTS}
    draw(path, "Shardwise, as a fraction of torch (dashed)", [Panel("", bars=bars, mark=1)])
