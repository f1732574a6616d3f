"""How long a training step takes: ours, torch's FSDP2, FSDP1 and DDP, and the compute-only floor.

    python benchmarks/step_time.py --params 34m,150m --zero 2,3

All contenders run in one go and take turns: in each round every contender takes a few steps while
the others sleep. What a table shows is the median over rounds; a ratio is the median of the
ratios within a round. Each contender trains the same model on the same tokens, and the losses
must agree to four decimals, or the exit code is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import psutil

from _contenders import Case
from _measured import disagreement
from _models import PRESETS
from _options import contender_env, end, one_of, parser, run, step_cases
from _turns import Pace, play_steps

DTYPES = ("fp32", "bf16", "bf16-params")


def play(case: Case, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Let all contenders of a case take turns; return the raw numbers."""
    names: list[str] = options.contenders
    found = play_steps(
        *(case, names, Pace(options.rounds, options.steps, options.warmup)),
        is_resident=options.worlds == "resident"
        or (options.worlds == "auto" and _fits(case, names)),
        env=partial(contender_env, transport=options.transport),
        say=lambda text: say(f"{case.label()}, {text}"),
    )
    return {**found, "transport": options.transport}


def _fits(case: Case, names: list[str]) -> bool:
    """Tell whether all worlds of a case fit into the memory that is free now."""
    whole = 4 * PRESETS[case.params].numel  # bytes in fp32
    state = 2  # AdamW's, of each parameter
    asleep = {
        "ddp": (2 + state) * case.ranks,
        "floor": case.ranks + state,
        "copies": 3 * case.ranks + state,
    }
    at_rest = sum(asleep.get(name, 1 + state) for name in names) * whole
    awake = 2 * case.ranks * whole  # a model being built, or parameters and gradients of a step
    processes = len(names) * case.ranks * 400 * 2**20
    return bool(at_rest + awake + processes < 0.6 * psutil.virtual_memory().available)


def main() -> int:
    made = parser(
        __doc__,
        ranks="2",
        params="34m",
        zero="3",
        tokens=256,
        seed=0,
        contenders="ours,fsdp2,fsdp1,ddp,floor",
        transport="auto",
        rounds=5,
        steps=3,
        warmup=4,
        worlds="auto",
    )
    made.add_argument("--dtype", type=one_of(*DTYPES), default="fp32", help=", ".join(DTYPES))
    options = made.parse_args()

    def cases(say: Callable[[str], None]) -> Iterable[dict[str, Any]]:
        return (play(case, options, say) for case in step_cases(options))

    return run("step_time", options, cases, lambda case: case.get("errors") or disagreement(case))


if __name__ == "__main__":
    end(main)
