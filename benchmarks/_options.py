"""Command-line options that the benchmarks share, as data, and the way in which all of them run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from _contenders import CONTENDERS, Case
from _models import PRESETS
from _report import announce, command, document, save
from _worlds import stop_server

Content = dict[str, Any]


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """Make a parser of comma-separated lists of some words."""

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if word not in choices:
                raise argparse.ArgumentTypeError(
                    f"{word!r} is not one of {', '.join(choices)} (or a list of them: a,b)"
                )
        return list(dict.fromkeys(words))

    return parse


def positive_ints(text: str) -> list[int]:
    """Parse a comma-separated list of positive integers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive integers (2 or 2,4)")
    return [int(word) for word in dict.fromkeys(words)]


def positive_int(text: str) -> int:
    """Parse one positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def natural(text: str) -> int:
    """Parse an integer that is not negative."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or a positive integer")
    return int(text)


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


def files(text: str) -> list[Path]:
    """Parse a comma-separated list of files that exist."""
    paths = [Path(word) for word in text.split(",")]
    for path in paths:
        if not path.is_file():
            raise argparse.ArgumentTypeError(f"there is no file {str(path)!r}")
    return paths


_OUTPUTS = ("json", "picture", "stored")
TRANSPORTS = ("auto", "c10d", "collectives", "shm")
_SHARED: dict[str, Content] = {
    "ranks": {"type": positive_ints, "help": "world sizes, e.g. 2 or 2,4"},
    "params": {"type": one_of(*PRESETS), "help": f"models: {', '.join(PRESETS)}"},
    "zero": {"type": one_of("2", "3"), "help": "2, 3 or both"},
    "tokens": {"type": positive_int, "help": "of a rank and step"},
    "contenders": {"type": one_of(*CONTENDERS), "help": f"some of {', '.join(CONTENDERS)}"},
    "rounds": {"type": positive_int, "help": "turns of each contender"},
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
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw here, as SVG or PNG")
    made.add_argument(
        "--stored", type=files, metavar="FILES", help="measure nothing: show these (a.json,b.json)"
    )
    return made


def run(
    script: str,
    options: argparse.Namespace,
    cases: Callable[[Callable[[str], None]], Iterable[Content]],
    wrong: Callable[[Content], object] = lambda case: None,
) -> int:
    """Measure the cases of a script, store all so far after each, and show tables and a picture.

    Args:
        script: its name.
        options: of the command line.
        cases: measures them, one after the other; gets what tells people how far it is.
        wrong: whether something is the matter with a case.

    Returns:
        The exit code: 1 if a case is wrong.
    """
    from _charts import PICTURES
    from report import SHOWN

    console = announce()

    def say(text: str) -> None:
        if console.is_terminal:
            console.print(f"  {text}", end="\r", soft_wrap=True)

    measured: list[Content] = []
    if options.stored:
        stored = [json.loads(path.read_text()) for path in options.stored]
        measured = [case for each in stored for case in each["cases"]]
        content = {**stored[0], "cases": measured}
    else:
        content = document(script, measured)
        for case in cases(say):
            measured.append(case)
            if options.json:
                save(options.json, content)
    for table in SHOWN[script](content):
        table.show(console)
    if options.picture:
        PICTURES[script](content, options.picture)
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
    return [
        Case(ranks, params, dtype, int(zero), options.tokens, seed=options.seed)
        for params, ranks, dtype, zero in product(
            options.params, options.ranks, options.dtype, options.zero
        )
    ]


def contender_env(name: str, transport: str) -> dict[str, str]:
    """Return the environment of a contender's processes: ours is told which transport to take."""
    return {"SHARDWISE_TRANSPORT": transport} if name.startswith("ours") else {}
