"""``shardwise calibrate``: measure this machine, for the times in plans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from shardwise.app.cli.values import read_path
from shardwise.base.units import show
from shardwise.elastic.errors import UserError

EXAMPLES = """
[bold]Examples[/bold]

Measure this machine, once; plans for CPUs then say how long a step takes:
  [cyan]shardwise calibrate[/cyan]
  [cyan]shardwise plan llama-34m --mesh dp=2 --device cpu[/cyan]
"""

# Processors that other programs may use while a machine is measured.
_BUSY = 0.2

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

    Takes about a minute. Nothing else should run meanwhile.
    """
    from shardwise.insight.planning.calibrate import (
        cache_file,
        check_writable,
        measure_machine,
        seconds_of_others,
    )
    from shardwise.insight.planning.machine import MachineError

    console, began = Console(), time.monotonic()

    def say(text: str) -> None:
        show(f"measuring  {text}")

    try:
        path = out or cache_file()
    except MachineError as error:
        raise UserError(f"{error}, or --out FILE") from None
    with _writing(path):
        check_writable(path)
    before, start = seconds_of_others(), time.monotonic()
    found = measure_machine(say)
    others = (seconds_of_others() - before) / (time.monotonic() - start)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", *(_processes(each.ranks) for each in found.measured)):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in found.summary():
        table.add_row(name, *values)
    console.print(table)
    with _writing(path):
        found.save(path)
    show(f"saved to {path} after {time.monotonic() - began:.0f} s")
    if others > _BUSY:
        console.print(
            f"warning: other programs used {others:.1f} processors meanwhile, so this machine "
            "can do more than what was measured; calibrate again when nothing else runs",
            style="yellow",
            highlight=False,
        )


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written."""
    try:
        yield
    except OSError as error:
        expected = "a file that can be written: --out FILE writes to another one"
        raise UserError(f"{path}: found {error.strerror}, expected {expected}") from None


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"each of {count}"
