"""Put the tables and the summary of stored results into the documentation.

    python benchmarks/report.py            # rewrite those in benchmarks/measurements.md and others
    python benchmarks/report.py --check    # exit code 1 if they do not show the stored results

The tables of a document go between two markers that name it under ``benchmarks/results/``:

    <!-- results: 2026-11-21-step-time.json -->
    ... replaced: command, machine, tables ...
    <!-- end of results -->

The summary of all documents goes between ``<!-- summary -->`` and ``<!-- end of summary -->``. Its
picture is ``docs/images/benchmarks.svg``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from _goodput_tables import goodput_tables
from _gpu_tables import gpu_tables
from _report import ROOT, machine_line
from _summary import draw_summary, table
from _tables import TABLES

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [
    ROOT / "docs" / "benchmarks.md",
    ROOT / "benchmarks" / "gpu.md",
    ROOT / "benchmarks" / "measurements.md",
]
PICTURE = ROOT / "docs" / "images" / "benchmarks.svg"
SHOWN = TABLES | {"goodput": goodput_tables, "gpu": gpu_tables}
_BETWEEN = re.compile(
    r"(?P<begin><!-- results: (?P<name>\S+) -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)
_SUMMARY = re.compile(
    r"(?P<begin><!-- summary -->\n).*?(?P<end><!-- end of summary -->)", re.DOTALL
)


def markdown(content: dict[str, Any], raw: str) -> str:
    """Show a document, which a page finds at ``raw``: where it was measured, then its tables."""
    head = [
        "```",
        content["command"],
        "```",
        "",
        f"{content['date']}, {machine_line(content['machine'])} ([raw numbers]({raw}))",
    ]
    tables = SHOWN[content["script"]](content)
    return "\n\n".join(["\n".join(head), *(table.markdown() for table in tables)])


def filled(page: Path, results: Path) -> str:
    """Return the text of a page with the tables between its markers made anew."""
    folder = os.path.relpath(RESULTS, page.parent)

    def between(match: re.Match[str]) -> str:
        name = match["name"]
        content = json.loads((results / name).read_text())
        return f"{match['begin']}\n{markdown(content, f'{folder}/{name}')}\n\n{match['end']}"

    text = _BETWEEN.sub(between, page.read_text())
    return _SUMMARY.sub(lambda m: f"{m['begin']}\n{table(results)}\n\n{m['end']}", text)


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
        draw_summary(options.results, PICTURE)
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
