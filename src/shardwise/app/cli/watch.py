"""``shardwise watch`` and ``shardwise compare``: the pages of runs, and runs beside each other."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.app.cli.options import Html, Integer, Json, PathArgument
from shardwise.base.errors import UserError
from shardwise.base.units import binary_size, counted, printable, show
from shardwise.insight.schema.option import OptionError, require
from shardwise.runs.files import RunFiles

if TYPE_CHECKING:
    from shardwise.runs.serve import Server


WATCH = """
[bold]Examples[/bold]

Follow a training in the browser, on this computer:
  [cyan]shardwise watch runs/lm[/cyan]

Follow several, in the same charts:
  [cyan]shardwise watch runs/lm runs/lm-2[/cyan]

A training on another computer:
  [cyan]ssh -L 8300:127.0.0.1:8300 other shardwise watch runs/lm --port 8300[/cyan]
"""

COMPARE = """
[bold]Examples[/bold]

What differs between two runs, and how they went:
  [cyan]shardwise compare runs/lm runs/lm-2[/cyan]

The same with their curves, as a page:
  [cyan]shardwise compare runs/* --html compared.html[/cyan]
"""

_PORT = 8265

Runs = Annotated[
    list[Path], PathArgument(metavar="RUN...", help="Folders of runs of shardwise train.")
]
Port = Annotated[
    int | None,
    Integer(
        help="Port on this computer; 0: any that is free.",
        show_default=f"{_PORT}, or any that is free",
    ),
]


def watch(runs: Runs, port: Port = None) -> None:
    """Show runs in the browser, and follow them while they train.

    The page is served to this computer alone. It shows the curves, memory against
    the plan, ranks and hosts, checkpoints, samples and the configuration.
    """
    _check(runs)
    require(port is None or 0 <= port < 65536, "--port", port, "a port, 0 to 65535")
    with _serve(runs, port) as server:
        typer.echo(f"watching   {server.url} shows {_names(runs)}; Ctrl-C ends this")
        server.serve_forever()


def compare(runs: Runs, html: Html = None, json: Json = False) -> None:
    """Compare runs: how they went, and which settings differ.

    Of runs that are under way, it is what they have done so far.
    """
    from shardwise.runs.page import Updates, page
    from shardwise.runs.snapshot import RunReader

    _check(runs)
    require(len(runs) > 1, "RUN...", "one run", "two or more")
    found = [RunReader(root).read() for root in runs]
    if html is not None:
        # Into the file that is there: it may be a device, such as /dev/stdout.
        size = html.write_bytes(page(_names(runs), found, Updates.NEVER).encode())
        typer.echo(printable(f"wrote {html}: {binary_size(size)}"), err=True)
    if json:
        print(json_module.dumps(vars(compared(found))))  # ASCII: some text has no encoding
    elif html is None:
        show(compared(found))


def _check(runs: list[Path]) -> None:
    for root in runs:
        if not root.is_dir():
            raise OptionError("RUN...", root, "the folder of a run")
        files = RunFiles(root)
        is_run = files.run_json.exists() or files.metrics.exists()
        expected = f"the folder of a run, with a {files.run_json.name}"
        require(is_run, "RUN...", f"{root}, which has none", expected)


def _serve(runs: list[Path], port: int | None) -> Server:
    from shardwise.runs.serve import ADDRESS, Server

    try:
        return Server(runs, _names(runs), _PORT if port is None else port)
    except OSError as error:
        if port is None:
            return Server(runs, _names(runs))
        raise UserError(
            f"--port: found {port}, which cannot be listened on at {ADDRESS} ({error.strerror}); "
            "another one, or 0 for any that is free"
        ) from None


def _names(runs: list[Path]) -> str:
    return printable(", ".join(root.resolve().name for root in runs))


def add_to(cli: typer.Typer, *_: str) -> None:
    """Register the commands."""
    cli.command("watch", epilog=WATCH)(watch)
    cli.command("compare", epilog=COMPARE)(compare)


_WIDEST = 40  # columns of a value


@dataclass(frozen=True)
class Comparison:
    """What runs have come to, and where their settings differ.

    Attributes:
        results: by run, what it has come to: state, step, losses, speed, memory.
        differing: by setting, its value in each run; None where a run does not have it.
        same: how many settings are the same in all runs.
    """

    results: Mapping[str, Mapping[str, Any]]
    differing: Mapping[str, Sequence[Any]]
    same: int

    def __str__(self) -> str:
        names = list(self.results)
        rows = [["", *names]]
        kinds = dict.fromkeys(kind for result in self.results.values() for kind in result)
        rows += [
            [_shown(kind), *(_shown(self.results[n].get(kind)) for n in names)] for kind in kinds
        ]
        rows.append([])
        rows += [[_shown(name), *map(_shown, values)] for name, values in self.differing.items()]
        if not self.differing:
            rows.append([f"all {self.same} settings are the same"])
        elif self.same:
            rows.append([f"{self.same} other settings are the same"])
        # Names of runs, settings and metrics may be as hostile as their values.
        rows = [[printable(cell) for cell in row] for row in rows]
        widths = [
            max((len(row[at]) for row in rows if at < len(row) and len(row) > 1), default=0)
            for at in range(len(names) + 1)
        ]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
            for row in rows
        )
        return "\n".join(lines)


def compared(runs: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare runs.

    Args:
        runs: what each says; see :meth:`.snapshot.RunReader.read`.
    """
    names = _distinct_names(runs)
    settings = dict.fromkeys(name for run in runs for name in run["config"])
    values = {name: [run["config"].get(name) for run in runs] for name in settings}
    differing = {
        name: found for name, found in values.items() if any(v != found[0] for v in found[1:])
    }
    results = {name: _result(run) for name, run in zip(names, runs, strict=True)}
    return Comparison(results, differing, len(settings) - len(differing))


def _distinct_names(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names that tell the runs apart: that of the folder, or its path."""
    names = [run["name"] for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run["folder"] for run in runs]
    distinct = len(set(paths)) == len(paths)
    return paths if distinct else [f"{path} ({at})" for at, path in enumerate(paths, start=1)]


def _result(run: Mapping[str, Any]) -> dict[str, Any]:
    latest, curves = run["latest"], run["curves"]["values"]
    session = run["sessions"][-1] if run["sessions"] else {}
    found = {
        "state": run["state"],
        "model": run["model"],
        "ranks": session.get("world_size"),
        "step": latest.get("step"),
        "loss": latest.get("loss"),
    }
    if "validation_loss" in curves:
        curve = curves["validation_loss"]
        lows = [low for low in curve.get("low", curve["mean"]) if low is not None]
        found["best validation_loss"] = min(lows, default=None)
    if gaps := run["curves"]["not_finite"]:
        found["not finite"] = ", ".join(
            f"{name} in {counted(count, 'step')} from {first}"
            for name, (count, first) in gaps.items()
        )
    speed = [name for name in latest if name.endswith("_per_s")]
    names = [*speed, *(name for name in ("memory_mib", "mfu") if name in latest)]
    return {**found, **{name: latest[name] for name in names}}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."
