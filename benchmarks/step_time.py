"""How long a training step takes: ours, torch's FSDP2 and DDP, and the compute-only floor.

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
from statistics import fmean, median
from typing import Any

import psutil

from _contenders import CONTENDERS, TITLES, Case
from _options import Content, contender_env, end, one_of, parser, run, step_cases
from _report import Table, compared
from _turns import Pace, disagreement, losses, play_steps, slowest, step_seconds, verdict

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
    whole = 4 * case.numel  # bytes in fp32
    state = 2  # AdamW's, of each parameter
    asleep = {
        "ddp": (2 + state) * case.ranks,
        "floor": case.ranks + state,
        "copies": 3 * case.ranks + state,
        "messages": 2 * case.ranks + state,
    }
    at_rest = sum(asleep.get(name, 1 + state) for name in names) * whole
    awake = 2 * case.ranks * whole  # a model being built, or parameters and gradients of a step
    processes = len(names) * case.ranks * 400 * 2**20
    return bool(at_rest + awake + processes < 0.6 * psutil.virtual_memory().available)


def table(case: Content) -> Table:
    """Show a case."""
    turns = case["contenders"]

    def part(what: str) -> Callable[[str], str]:
        def cell(name: str) -> str:
            steps = [step for turn in turns[name] for step in turn["steps"]]
            return f"{median(fmean(rank[what] for rank in step) for step in steps):.3f}"

        return cell

    def last_loss(name: str) -> str:
        return f"{losses(case, name)[-1]:.4f}" if CONTENDERS[name].exchanges else ""

    every = [turn for name in turns for turn in turns[name]]
    rounds, steps = len(every) // len(turns), len(every[0]["steps"])
    measured = sum(slowest(step, "seconds") for turn in every for step in turn["steps"])
    return compared(
        f"{Case.stored(case).label()} ({case['numel'] / 1e6:.1f} M)",
        ("contender", "step s", 3),
        {name: step_seconds(case, name) for name in turns},
        TITLES,
        peers={"x FSDP2": "fsdp2", "x DDP": "ddp", "x floor": "floor"},
        beside={
            **{what: part(what) for what in ("forward", "backward", "optimizer")},
            "CPU s": part("cpu"),
            "last loss": last_loss,
        },
        notes=[
            verdict(case),
            *(f"{TITLES[name]}: {error}" for name, error in case["errors"].items()),
            f"{rounds} rounds, {rounds * steps} measured steps each contender; "
            f"transport of ours: {case['transport']}; {case['worlds']} worlds",
            f"while {measured:.0f} s were measured, sleeping contenders took "
            f"{case['idle_cpu_seconds']:.2f} s of processor time, other programs "
            f"{sum(turn['foreign_cpu_seconds'] for turn in every):.1f} s",
        ],
    )


def wrong(case: Content) -> object:
    """Tell what is the matter with a case."""
    return case["errors"] or disagreement(case)


def main() -> int:
    case = {"ranks": "2", "params": "34m", "zero": "3", "tokens": 256, "seed": 0}
    pace = {"rounds": 5, "steps": 3, "warmup": 4, "worlds": "auto"}
    made = parser(__doc__, **case, contenders="ours,fsdp2,ddp,floor", transport="auto", **pace)
    made.add_argument("--dtype", type=one_of(*DTYPES), default="fp32", help=", ".join(DTYPES))
    options = made.parse_args()

    def cases(say: Callable[[str], None]) -> Iterable[dict[str, Any]]:
        return (play(case, options, say) for case in step_cases(options))

    return run("step_time", options, cases, lambda cases: [*map(table, cases)], wrong)


if __name__ == "__main__":
    end(main)
