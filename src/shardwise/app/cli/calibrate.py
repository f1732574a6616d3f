"""``shardwise calibrate``: measure this machine, for the times in plans."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from shardwise.app.cli.values import read_path
from shardwise.app.recipes.core.begin import check_extras
from shardwise.base.units import show
from shardwise.elastic.errors import UserError

if TYPE_CHECKING:
    from shardwise.insight.planning.calibrate import Calibration
    from shardwise.insight.planning.machine import Link

EXAMPLES = """
[bold]Examples[/bold]

Measure this machine, once; plans for CPUs then say how long a step takes:
  [cyan]shardwise calibrate[/cyan]
  [cyan]shardwise plan llama-34m --mesh dp=2 --device cpu[/cyan]
"""

# Processors that other programs may use while a machine is measured.
_BUSY = 0.5

#: What is shown of the costs of units of work: names, and units a second.
_RATES = {
    "product.float32": ("matrix products in float32", "GFLOP/s"),
    "product.bfloat16": ("matrix products in bfloat16", "GFLOP/s"),
    "attention.float32": ("attention in float32", "GFLOP/s"),
    "bytes.float32": ("other operations in float32", "GB/s"),
    "bytes.optimizer": ("AdamW", "GB/s"),
}

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

    Records small trainings, which takes about a minute. Nothing else should run
    meanwhile.
    """
    from shardwise.insight.planning.calibrate import cache_file, check_writable
    from shardwise.insight.planning.machine import MachineError
    from shardwise.insight.timeline.recorded import measure_machine

    check_extras(["transformers"])
    console, began = Console(), time.monotonic()

    def say(text: str) -> None:
        show(f"measuring  {text}")

    try:
        path = out or cache_file()
    except MachineError as error:
        raise UserError(f"{error}, or --out FILE") from None
    with _writing(path):
        check_writable(path)
    others = os.getloadavg()[0]
    found = measure_machine(say)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", *map(_processes, found.costs)):
        table.add_column(heading, justify="right" if heading else "left")
    for name, values in _shown(found):
        table.add_row(name, *values)
    console.print(table)
    with _writing(path):
        found.save(path)
    show(f"saved to {path} after {time.monotonic() - began:.0f} s")
    if others > _BUSY:
        console.print(
            f"warning: other programs used {others:.1f} processors in the minute before, so this "
            "machine may do more than what was measured; calibrate again when nothing else runs",
            style="yellow",
            highlight=False,
        )


def _shown(found: Calibration) -> Iterator[tuple[str, list[str]]]:
    """What was measured in words: a name, and a value for each number of ranks."""
    from shardwise.insight.planning.calibrate import links_of, rate

    every = list(found.costs.values())
    for unit, (name, per_second) in _RATES.items():
        yield name, [f"{rate(costs, unit) / 1e9:,.0f} {per_second}" for costs in every]
    yield "each operation of forward", [f"{1e6 * c['call.forward']:.1f} µs" for c in every]
    links = [links_of(costs) for costs in every]
    for name in sorted({name for each in links for name in each}):
        words = [_words_of(each[name]) if name in each else "" for each in links]
        yield f"collectives over {name}", words


def _words_of(link: Link) -> str:
    each = f"{1e6 * link.launch:,.0f} µs each"
    return f"{1 / link.host_cost / 1e9:.2f} GB/s, {each}" if link.host_cost else each


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


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the command."""
    cli.command("calibrate", epilog=EXAMPLES)(calibrate)
