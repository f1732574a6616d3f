"""``shardwise calibrate``: measure this machine, for the times in plans."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from shardwise.cli.values import read_path
from shardwise.elastic.errors import UserError

EXAMPLES = """
[bold]Examples[/bold]

Measure this machine, once; plans for CPUs then say how long a step takes:
  [cyan]shardwise calibrate[/cyan]
  [cyan]shardwise plan llama-34m --mesh dp=2 --device cpu[/cyan]
"""

Out = Annotated[
    Path | None,
    Option(
        parser=read_path,
        metavar="FILE",
        help="Write the measurements to this file.",
        show_default="in the user's cache folder, where plans look for them",
    ),
]


def calibrate(out: Out = None) -> None:
    """Measure what this machine can do: products, memory, messages, overhead.

    Takes under a minute. Nothing else should run meanwhile.
    """
    from shardwise.planning.calibrate import cache_file, measure_machine

    console, began = Console(), time.monotonic()

    def say(text: str) -> None:
        console.print(f"measuring  {text}", highlight=False)

    found = measure_machine(say)
    path = out or cache_file()
    try:
        found.save(path)
    except OSError as error:
        raise UserError(f"--out: {path}: {error.strerror}") from None
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", *(_processes(each.ranks) for each in found.measured)):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in found.summary():
        table.add_row(name, *values)
    console.print(table)
    console.print(f"saved to {path} after {time.monotonic() - began:.0f} s", highlight=False)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"each of {count}"
