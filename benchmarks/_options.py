"""Command-line options that the benchmarks share, as data, and the way in which all of them run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from _contenders import CONTENDERS, Case
from _models import PRESETS
from _report import Table, command, document, machine, machine_line, save, wide_console
from _worlds import stop_server

Content = dict[str, Any]


def listed(word: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Make a parser of comma-separated lists of what another one parses."""

    def parse(text: str) -> list[Any]:
        return list(dict.fromkeys(word(each.strip()) for each in text.split(",")))

    return parse


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """Make a parser of comma-separated lists of some words."""

    def parse(word: str) -> str:
        if word not in choices:
            raise argparse.ArgumentTypeError(
                f"{word!r} is not one of {', '.join(choices)} (or a list of them: a,b)"
            )
        return word

    return listed(parse)


def whole(least: int) -> Callable[[str], int]:
    """Make a parser of integers that are no less than some."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return parse


positive_int = whole(1)


def number(low: float, high: float, what: str) -> Callable[[str], float]:
    """Make a parser of numbers within a range, both ends included."""

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return found

    return parse


_OUTPUTS = ("json", "picture")
TRANSPORTS = ("auto", "c10d", "collectives", "shm")
_SHARED: dict[str, Content] = {
    "ranks": {"type": listed(positive_int), "help": "world sizes, e.g. 2 or 2,4"},
    "params": {"type": one_of(*PRESETS), "help": f"models: {', '.join(PRESETS)}"},
    "zero": {"type": one_of("2", "3"), "help": "2, 3 or both"},
    "tokens": {"type": positive_int, "help": "of a rank and step"},
    "contenders": {"type": one_of(*CONTENDERS), "help": f"some of {', '.join(CONTENDERS)}"},
    "rounds": {"type": positive_int, "help": "turns of each contender"},
    "cases": {"type": listed(positive_int), "help": "numbers of cases from 1, with commas; all"},
    "steps": {"type": positive_int, "help": "steps in a turn"},
    "warmup": {"type": positive_int, "help": "steps before a world is measured"},
    "worlds": {
        "choices": ("auto", "resident", "fresh"),
        "help": "resident: all contenders stay in memory; fresh: each turn starts its processes "
        "anew; auto: resident where memory allows",
    },
    "transport": {"choices": TRANSPORTS, "help": "of ours"},
    "folder": {"type": Path, "help": "on the disk to be measured, not that of temporary files"},
    "seed": {"type": int, "help": "of weights and tokens"},
    "picture": {"type": Path, "metavar": "FILE", "help": "draw here, as SVG or PNG"},
}


def parser(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Make a parser of options that several benchmarks have.

    Args:
        doc: of the script, whose first line the help begins with.
        defaults: of the options that the script has, by name; text as on the command line.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in defaults.items():
        shared = _SHARED[name]
        shown = shared["help"] if default is None else f"{shared['help']} ({default})"
        made.add_argument(f"--{name}", default=default, **{**shared, "help": shown})
    made.add_argument("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made


def run(
    script: str,
    options: argparse.Namespace,
    cases: Callable[[Callable[[str], None]], Iterable[Content]],
    tables: Callable[[list[Content]], list[Table]],
    wrong: Callable[[Content], object] = lambda case: None,
    draw: Callable[[Sequence[Content], Path], None] | None = None,
) -> int:
    """Measure the cases of a script, store all so far after each, and show tables and a picture.

    Args:
        script: its name.
        options: of the command line.
        cases: measures them, one after the other; gets what tells people how far it is.
        tables: makes the tables of all cases.
        wrong: whether something is the matter with a case.
        draw: draws documents of the script, if it has ``--picture``.

    Returns:
        The exit code: 1 if a case is wrong.
    """
    console = wide_console()
    console.print(f"[bold]{machine_line(machine())}[/bold]", highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        if console.is_terminal:
            console.print(f"  {text}", end="\r", soft_wrap=True)

    measured: list[Content] = []
    content = document(script, measured)
    shown: list[Table] = []
    for case in cases(say):
        measured.append(case)
        shown = tables(measured)
        content["tables"] = [asdict(table) for table in shown]
        if options.json:
            save(options.json, content)
    for table in shown:
        table.show(console)
    if draw and options.picture:
        draw([content], options.picture)
    console.print(command(), highlight=False, soft_wrap=True)
    return 1 if any(map(wrong, measured)) else 0


def plain(options: argparse.Namespace) -> Content:
    """Return the options that say what was measured, for a document."""
    return {name: each for name, each in vars(options).items() if name not in _OUTPUTS}


def end(main: Callable[[], int]) -> None:
    """Run the main function of a script, and leave no process behind."""
    try:
        sys.exit(main())
    finally:
        stop_server()


def step_cases(options: argparse.Namespace) -> list[Case]:
    """List the cases that the options ask for: every combination."""
    asked: Content = {"dtype": ["fp32"], "zero": ["3"], "tokens": 256, **vars(options)}
    return [
        Case(ranks, params, dtype, int(zero), asked["tokens"], seed=options.seed)
        for params, ranks, dtype, zero in product(
            *(asked[name] for name in ("params", "ranks", "dtype", "zero"))
        )
    ]


def contender_env(name: str, transport: str) -> dict[str, str]:
    """Return the environment of a contender's processes: ours is told which transport to take."""
    return {"SHARDWISE_TRANSPORT": transport} if name.startswith("ours") else {}
