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
from collections.abc import Callable, Iterator
from typing import Any

from _contenders import Case
from _measured import disagreement
from _models import PRESETS
from _options import end, one_of, parser, run
from _tables import AXES
from step_time import play

GROUPS = [name.partition("-")[0] for name in PRESETS if name.endswith("-groups")]


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


def main() -> int:
    made = parser(
        __doc__,
        ranks="1,2,4,8",
        params="10m,34m,150m,400m",
        tokens=64,
        seed=0,
        rounds=5,
        steps=2,
        warmup=3,
        worlds="auto",
        transport="auto",
    )
    axes, groups = ",".join(AXES), ",".join(GROUPS)
    add = made.add_argument
    add("--axes", type=one_of(*AXES), default=axes, help=f"what to let grow ({axes})")
    add("--groups", type=one_of(*GROUPS), default=groups, help=f"of the axis groups ({groups})")
    made.set_defaults(contenders=["ours", "fsdp2", "floor"])
    options = made.parse_args()

    def cases(say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        for axis in options.axes:
            for case in axis_cases(axis, options):
                yield {"axis": axis, **play(case, options, say)}

    return run("scaling", options, cases, disagreement)


if __name__ == "__main__":
    end(main)
