"""What a benchmark leaves behind: a JSON document with its tables and its raw numbers.

The document of any script:

    {"schema": 1, "script": "step_time", "command": "python benchmarks/step_time.py ...",
     "date": "2026-11-21", "machine": {...}, "tables": [...], "cases": [...]}

Tables are stored as they were shown: pages show them again, whatever a script measures by then.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20


@dataclass
class Table:
    """Rows of text under a title; the first column is left-aligned, the others right-aligned."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """Print for people."""
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False, soft_wrap=True)
        console.print()

    def markdown(self) -> str:
        """Return the table as Markdown, title and notes included."""
        align = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = [f"**{self.title}**", ""]
        lines += [_row(self.columns), _row(align), *map(_row, self.rows)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines)


def compared(
    title: str,
    columns: tuple[str, str, int],
    values: Mapping[str, Sequence[float]],
    titles: Mapping[str, str],
    *,
    peers: Mapping[str, str | Callable[[str], str]],
    beside: Mapping[str, Callable[[str], str]],
    notes: Sequence[str] = (),
) -> Table:
    """Make a table of contenders that took turns: medians, quartiles and ratios of rounds.

    Args:
        title: of the table.
        columns: what rows are, what values are, and with how many decimals these are shown.
        values: of each contender, one for each round.
        titles: what contenders are called.
        peers: by the title of a column, of which contender it has the multiples; or of which
            contender for each one. A ratio is the median of those within rounds.
        beside: by the title of a column, what it has for each contender.
        notes: below the table.
    """
    head, unit, digits = columns
    table = Table(title, [head, unit, "quartiles", *peers, *beside], notes=list(notes))
    for name, rounds in values.items():
        cells = [titles[name], f"{median(rounds):.{digits}f}", quartiles(rounds, digits)]
        for peer in peers.values():
            other = values.get(peer if isinstance(peer, str) else peer(name))
            cells.append(ratio(rounds, other) if other else "")
        table.rows.append([*cells, *(cell(name) for cell in beside.values())])
    return table


def quartiles(values: Sequence[float], digits: int) -> str:
    """Show what half of the rounds lie between."""
    ends = [*values] * 2 if len(values) == 1 else quantiles(values, method="inclusive")[::2]
    return " to ".join(f"{round(each, digits) + 0:.{digits}f}" for each in ends)  # no "-0"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """Show the median over rounds of one value over another's of the same round.

    So noise of the machine hits both sides alike.
    """
    return f"{median(m / t for m, t in zip(mine, theirs, strict=True)):.2f}"


def mib(size: float | None, digits: int = 1) -> str:
    """Show bytes in MiB."""
    return "" if size is None else f"{size / MIB:,.{digits}f}"


def wide_console() -> Console:
    """Return a console that never cuts a figure off to fit the window."""
    from rich.console import Console

    return Console(width=max(Console().width, 140))


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def machine() -> dict[str, Any]:
    """Describe where the figures come from."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine_line(facts: dict[str, Any]) -> str:
    """Put :func:`machine` on one line."""
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB{gpu}; "
        f"{facts['system']}, Python {facts['python']}, torch {facts['torch']}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.partition(":") for line in lines)
    facts = {key.strip(): value.strip() for key, _, value in pairs}  # of the last core
    name = facts.get("model name", platform.machine())
    return f"{name} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def command() -> str:
    """Return the command line of this process, with the script's path as seen from the project."""
    script, *arguments = sys.argv
    return shlex.join(["python", os.path.relpath(Path(script).resolve(), ROOT), *arguments])


def document(script: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Wrap the cases of a script with what is needed to judge and repeat them."""
    return {
        "schema": 1,
        "script": script,
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "tables": [],
        "cases": cases,
    }


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
