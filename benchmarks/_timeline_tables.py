"""Tables of a ``timeline`` document."""

from __future__ import annotations

import statistics
from typing import Any

from _report import Table


def timeline_tables(content: dict[str, Any]) -> list[Table]:
    """Make a table of what recording costs, with a row for each case."""
    columns = ["case", "step", "ratio", "quartiles", "CPU ratio"]
    shown = Table(
        "A step while it is recorded",
        [*columns, "spans", "begin", "end", "reports", "questions"],
        notes=[
            "step: median of the slowest rank, not recorded. Ratios: recorded to not, over rounds.",
            "begin and end: seconds that the recording itself takes there, once.",
            "reports: the share of a step that its reports take, by their number and their price.",
            "questions: the same of a step that is not recorded: whether anybody watches.",
        ],
    )
    for case in content["cases"]:
        seconds = [_ratio(turn, "seconds") for turn in case["turns"]]
        cpu = [_ratio(turn, "cpu") for turn in case["turns"]]
        off = statistics.median(_step(turn["off"], "seconds") for turn in case["turns"])
        first, _, third = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
        last = case["turns"][-1]["on"][0]
        price = case["price"]
        questions = (2 * last["spans"] + last["changes"]) * price["question"]
        reports = last["spans"] * price["span"] + last["changes"] / 2 * price["tensor"]
        begin = statistics.median(turn["on"][0]["begin"] for turn in case["turns"])
        end = statistics.median(turn["on"][0]["end"] for turn in case["turns"])
        shown.rows.append(
            [
                f"{case['params']}, {case['ranks']} ranks, {case['transport']}",
                f"{1e3 * off:.1f} ms",
                f"{statistics.median(seconds):.4f}",
                f"{first:.4f} to {third:.4f}",
                f"{statistics.median(cpu):.4f}",
                f"{last['spans']:.0f}",
                f"{1e3 * begin:.1f} ms",
                f"{1e3 * end:.1f} ms",
                f"{100 * reports / off:.2f} %",
                f"{100 * questions / off:.3f} %",
            ]
        )
    return [shown]


def _step(ranks: list[dict[str, Any]], what: str) -> float:
    """Return the median over steps of the slowest rank's figure."""
    return statistics.median(map(max, zip(*(rank[what] for rank in ranks), strict=True)))


def _ratio(turn: dict[str, Any], what: str) -> float:
    return _step(turn["on"], what) / _step(turn["off"], what)
