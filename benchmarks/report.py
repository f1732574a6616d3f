"""Put the tables and the summary of stored results into the documentation, and draw its pictures.

    python benchmarks/report.py            # rewrite those in benchmarks/measurements.md and others
    python benchmarks/report.py --check    # exit code 1 if they do not show the stored results

The tables of a document go between two markers that name it under ``benchmarks/results/``:

    <!-- results: 2026-11-21-step-time.json -->
    ... replaced: command, machine, tables ...
    <!-- end of results -->

The summary of all documents goes between ``<!-- summary -->`` and ``<!-- end of summary -->``: one
row for each measurement, beside torch's implementation. It takes its figures from the tables of
stored documents.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _charts import OURS, draw_bars
from _gpu_tables import gpu_tables
from _report import ROOT, Table, machine_line
from goodput import draw_goodput
from strategies import draw_strategies

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    ROOT / "docs" / "benchmarks.md",
    ROOT / "benchmarks" / "gpu.md",
    ROOT / "benchmarks" / "measurements.md",
]
IMAGES = ROOT / "docs" / "images"
#: The pictures beside that of the summary: by name, what draws each, of which documents.
DRAWN: dict[str, tuple[Callable[[Sequence[dict[str, Any]], Path], None], list[str]]] = {
    "strategies": (
        draw_strategies,
        [f"2026-11-22-strategies-{gbit}-gbit.json" for gbit in ("10", "1", "0.1")],
    ),
    "goodput": (draw_goodput, ["2026-11-23-goodput.json"]),
}
_BETWEEN = re.compile(
    r"(?P<begin><!-- results: (?P<name>\S+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)
_SUMMARY = re.compile(
    r"(?P<begin><!-- summary -->\n).*?(?P<end><!-- end of summary -->)", re.DOTALL
)


def tables_of(content: dict[str, Any]) -> list[Table]:
    """Return the tables of a document."""
    if "parts" in content and not content.get("tables"):  # the first GPU's, or cut short
        return gpu_tables(content)
    return [Table(**table) for table in content["tables"]]


# -- the summary -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """A row of the summary, from one table of a document.

    Attributes:
        what: was measured, and where.
        result: the stored document.
        column: of the figures.
        ratio: the column of their ratio.
        unit: of the figures.
        decimals: to show.
        rows: ours and torch's.
        title: words that only the title of the table has.
        power: -1 where the ratio is of throughput, 1 elsewhere.
    """

    what: str
    result: str
    column: str
    ratio: str
    unit: str = "s"
    decimals: int = 2
    rows: tuple[str, str] = ("shardwise", "torch FSDP2")
    title: str = ""
    power: int = 1

    def measured(self, results: Path) -> tuple[float, float, float]:
        """Read both figures and their ratio from a folder of documents.

        Raises:
            FileNotFoundError: the document is not there.
            StopIteration: no table of the document has the title.
        """
        found = tables_of(json.loads((results / self.result).read_text()))
        table = next(table for table in found if self.title in table.title)
        by_row: dict[str, list[str]] = {}
        for row in table.rows:
            by_row.setdefault(row[0], row)
        mine, theirs = (by_row[row] for row in self.rows)
        column, over = table.columns.index(self.column), table.columns.index(self.ratio)
        return float(mine[column]), float(theirs[column]), float(mine[over]) ** self.power


COPIES, COLD = "2026-11-22-copies-34m.json", "2026-11-21-checkpoint-cold.json"
MEASUREMENTS = (
    Measurement(*("Step, ZeRO-3: one host, 2 ranks", COPIES, "step s", "x FSDP2"), title="ZeRO-3"),
    Measurement(*("Step, ZeRO-2: one host, 2 ranks", COPIES, "step s", "x FSDP2"), title="ZeRO-2"),
    Measurement(
        "Step, ZeRO-3: one host, 2 ranks, over gloo",
        *("2026-11-21-gloo-step-time-34m.json", "step s", "x FSDP2"),
        title="2 ranks, fp32, ZeRO-3",
    ),
    Measurement(
        "Step, ZeRO-3: two hosts, 4 ranks, 1 Gbit/s",
        *("2026-11-29-own-loop-1-gbit.json", "step s", "x FSDP2 full"),
        rows=("FULL_SHARD, own loop", "torch FSDP2, full"),
    ),
    Measurement(
        "Step, hybrid: two hosts, 4 ranks, 1 Gbit/s",
        *("2026-11-22-strategies-1-gbit.json", "step s", "x FSDP2 hybrid"),
        rows=("HYBRID_SHARD", "torch FSDP2, hybrid"),
    ),
    Measurement(
        "Overhead per group, nothing to move: 1 rank",
        *("2026-11-22-overhead.json", "µs a group", "x FSDP2", "µs", 0),
    ),
    Measurement(
        "Peak memory per rank, ZeRO-3: 2 ranks, over gloo",
        *("2026-11-21-gloo-memory-34m.json", "peak", "x FSDP2", "MiB", 0),
        title="fp32, ZeRO-3",
    ),
    Measurement(
        *("Save a checkpoint, 1.78 GB: 2 ranks", COLD, "s", "x DCP"),
        rows=("shardwise, save", "torch DCP, save"),
        power=-1,
    ),
    Measurement(
        *("Load it from disk: 2 ranks", COLD, "s", "x DCP"),
        rows=("shardwise, load", "torch DCP, load"),
        power=-1,
    ),
)


def summary(results: Path) -> str:
    """Return the summary as a Markdown table.

    Args:
        results: folder of the documents.

    Raises:
        FileNotFoundError: a document is not there.
    """
    rows = ["| | Shardwise | torch | ratio |", "| --- | ---: | ---: | ---: |"]
    for each in MEASUREMENTS:
        *both, ratio = each.measured(results)
        mine, theirs = (f"{value:.{each.decimals}f} {each.unit}" for value in both)
        link = f"[{each.what}](../benchmarks/results/{each.result})"
        rows.append(f"| {link} | {mine} | {theirs} | {ratio:.2f} |")
    return "\n".join(rows)


def draw_all(results: Path) -> None:
    """Draw the pictures of the documentation."""
    bars = {each.what: (each.measured(results)[2], OURS) for each in MEASUREMENTS}
    name = "Shardwise, as a fraction of torch (dashed)"
    draw_bars(IMAGES / "benchmarks.svg", name, [("", bars, 1.0)])
    for picture, (draw, names) in DRAWN.items():
        documents = [json.loads((results / name).read_text()) for name in names]
        draw(documents, IMAGES / f"{picture}.svg")


# -- pages -----------------------------------------------------------------------------------------


def markdown(content: dict[str, Any], raw: str) -> str:
    """Show a document, which a page finds at ``raw``: where it was measured, then its tables."""
    head = [
        "```",
        content["command"],
        "```",
        "",
        f"{content['date']}, {machine_line(content['machine'])} ([raw numbers]({raw}))",
    ]
    return "\n\n".join(["\n".join(head), *(table.markdown() for table in tables_of(content))])


def filled(page: Path, results: Path) -> str:
    """Return the text of a page with the tables between its markers made anew."""
    folder = os.path.relpath(RESULTS, page.parent)

    def between(match: re.Match[str]) -> str:
        name = match["name"]
        shown = markdown(json.loads((results / name).read_text()), f"{folder}/{name}")
        return f"{match['begin']}\n{shown}\n\n{match['end']}"

    text = _BETWEEN.sub(between, page.read_text())
    return _SUMMARY.sub(lambda m: f"{m['begin']}\n{summary(results)}\n\n{m['end']}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    parser.add_argument("--document", type=Path, nargs="+", default=DOCUMENTS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    options = parser.parse_args()
    try:
        stale = [path for path in options.document if not _is_current(path, options)]
    except FileNotFoundError as error:
        parser.error(f"{error.filename} does not exist")
    if options.document == DOCUMENTS and not options.check:
        draw_all(options.results)
    for path in stale if options.check else []:
        print(f"{path} does not show the stored results: run benchmarks/report.py")
    return 1 if options.check and stale else 0


def _is_current(path: Path, options: argparse.Namespace) -> bool:
    """Tell whether a page shows the stored results; rewrite it unless that is forbidden."""
    before = path.read_text()
    after = filled(path, options.results)
    if before != after and not options.check:
        path.write_text(after)
    return before == after


if __name__ == "__main__":
    sys.exit(main())
