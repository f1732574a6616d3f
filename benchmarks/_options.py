"""Command-line options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from _contenders import CONTENDERS, Case
from _models import PRESETS

TRANSPORTS = ("auto", "c10d", "collectives", "shm")


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


def parser(
    description: str, contenders: str, dtypes: Sequence[str] = ("fp32", "bf16")
) -> argparse.ArgumentParser:
    """Make a parser with the options that choose cases and contenders.

    Args:
        description: first line of the help.
        contenders: the default list of contenders.
        dtypes: those of the cases that can be asked for.
    """
    made = argparse.ArgumentParser(description=description)
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[2], help="world sizes, e.g. 2 or 2,4")
    add("--params", type=one_of(*PRESETS), default=["34m"], help=f"models: {', '.join(PRESETS)}")
    add("--dtype", type=one_of(*dtypes), default=["fp32"], help=f"some of {', '.join(dtypes)}")
    add("--zero", type=one_of("2", "3"), default=["3"], help="2, 3 or both")
    add("--tokens", type=positive_int, default=256, help="tokens a rank and step (256)")
    add(
        "--contenders",
        type=one_of(*CONTENDERS),
        default=contenders.split(","),
        help=f"some of {', '.join(CONTENDERS)} ({contenders})",
    )
    add("--transport", choices=TRANSPORTS, default="auto", help="of ours (auto)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one GPU a rank")
    add("--seed", type=int, default=0, help="of weights and tokens (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made


def cases(options: argparse.Namespace) -> list[Case]:
    """List the cases that the options ask for: every combination."""
    return [
        Case(ranks, params, dtype, int(zero), options.tokens, options.device, options.seed)
        for params, ranks, dtype, zero in product(
            options.params, options.ranks, options.dtype, options.zero
        )
    ]


def contender_env(name: str, transport: str) -> dict[str, str]:
    """Return the environment of a contender's processes: ours is told which transport to take."""
    return {"SHARDWISE_TRANSPORT": transport} if name.startswith("ours") else {}
