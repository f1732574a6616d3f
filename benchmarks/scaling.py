"""How the communication part of a step grows: with ranks, with parameters, with groups.

    python benchmarks/scaling.py --axes ranks --json ranks.json
    python benchmarks/scaling.py --axes params,groups --json others.json
    python benchmarks/scaling.py --stored ranks.json,others.json --picture scaling.svg

The communication part is what a step takes beyond the compute-only floor: collectives, but also
hooks, copies, and waiting for each other. Ours, torch's FSDP2 and the floor take turns, as in
``step_time.py``, and what is told is the median over rounds of the difference within a round.

Every contender trains in fp32, ZeRO-3, with SGD, so that large models fit. Each rank has few
tokens, so that communication shows beside computing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from _contenders import Case
from _measured import disagreement
from _models import PRESETS
from _options import TRANSPORTS, one_of, positive_int, positive_ints
from _report import document, machine, machine_line, save, wide_console
from _scaling_picture import draw
from _tables import AXES, scaling_tables
from _worlds import stop_server
from step_time import Match

GROUPS = [int(name.partition("-")[0]) for name in PRESETS if name.endswith("-groups")]


def axis_cases(axis: str, options: argparse.Namespace) -> list[Case]:
    """List the cases of an axis: all is the same but for one thing."""
    if axis == "ranks":
        sizes = [(ranks, "10m") for ranks in options.ranks]
    elif axis == "params":
        sizes = [(2, params) for params in options.params]
    else:
        sizes = [(2, f"{groups}-groups") for groups in options.groups]
    return [
        Case(ranks, params, tokens=options.tokens, seed=options.seed, optimizer="sgd")
        for ranks, params in sizes
    ]


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure what was asked for; return the document."""
    played: list[dict[str, Any]] = []
    content = document("scaling", played)
    for axis in options.axes:
        for case in axis_cases(axis, options):
            played.append({"axis": axis, **Match(case, options, console).play()})
            if options.json:
                save(options.json, content)
    return content


def merged(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the cases of several documents of one machine into one."""
    return {**documents[0], "cases": [case for each in documents for case in each["cases"]]}


def _files(text: str) -> list[Path]:
    paths = [Path(word) for word in text.split(",")]
    for path in paths:
        if not path.is_file():
            raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return paths


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    names = ",".join(AXES)
    add("--axes", type=one_of(*AXES), default=[*AXES], help=f"what to let grow ({names})")
    add("--ranks", type=positive_ints, default=[1, 2, 4, 8], help="of the axis ranks (1,2,4,8)")
    add(
        "--params",
        type=one_of(*PRESETS),
        default=["10m", "34m", "150m", "400m"],
        help="of the axis params (10m,34m,150m,400m)",
    )
    add(
        "--groups",
        type=one_of(*map(str, GROUPS)),
        default=[*map(str, GROUPS)],
        help=f"of the axis groups ({','.join(map(str, GROUPS))})",
    )
    add("--tokens", type=positive_int, default=64, help="tokens a rank and step (64)")
    add("--rounds", type=positive_int, default=5, help="turns of a contender (5)")
    add("--steps", type=positive_int, default=2, help="steps in a turn (2)")
    add("--warmup", type=positive_int, default=3, help="steps before a world is measured (3)")
    add(
        "--worlds",
        choices=("auto", "resident", "fresh"),
        default="auto",
        help="whether contenders stay in memory: see step_time.py",
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="of ours (auto)")
    add("--seed", type=int, default=0, help="of weights and tokens (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    add("--picture", type=Path, metavar="FILE", help="draw the picture here, as SVG or PNG")
    add(
        "--stored",
        type=_files,
        metavar="FILES",
        help="measure nothing: show what these documents hold (a.json,b.json)",
    )
    made.set_defaults(contenders=["ours", "fsdp2", "floor"])
    return made.parse_args()


def main() -> int:
    options = _options()
    console = wide_console()
    if options.stored:
        content = merged([json.loads(path.read_text()) for path in options.stored])
    else:
        console.print(f"[bold]{machine_line(machine())}[/bold]", highlight=False, soft_wrap=True)
        content = measure(options, console)
    for table in scaling_tables(content):
        table.show(console)
    if options.picture:
        draw(content, options.picture)
    return 1 if any(disagreement(case) for case in content["cases"]) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
