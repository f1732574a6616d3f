"""How long a training step takes: ours, torch's FSDP2, FSDP1 and DDP, and the compute-only floor.

    python benchmarks/step_time.py --params 34m,150m --zero 2,3

All contenders run in one go and take turns: in each round every contender takes a few steps while
the others sleep. What a table shows is the median over rounds; a ratio is the median of the
ratios within a round. Each contender trains the same model on the same tokens, and the losses
must agree to four decimals, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import psutil
from rich.console import Console

from _contenders import Case
from _measured import disagreement
from _models import PRESETS
from _options import cases, contender_env, parser, positive_int
from _report import announce, publish_each
from _steps import StepWorker, transposed
from _tables import TABLES
from _worlds import World, stop_server


class Match:
    """All contenders of one case, taking turns."""

    def __init__(self, case: Case, options: argparse.Namespace, console: Console) -> None:
        self._case, self._options, self._console = case, options, console
        self._names: list[str] = options.contenders
        self._resident = options.worlds == "resident" or (
            options.worlds == "auto" and _fits(case, self._names)
        )
        self._worlds: dict[str, World] = {}
        self._idle_cpu = 0.0

    def play(self) -> dict[str, Any]:
        """Run all rounds and return the raw numbers of the case."""
        turns: dict[str, list[dict[str, Any]]] = {name: [] for name in self._names}
        try:
            for index in range(self._options.rounds):
                shift = index % len(self._names)
                for name in self._names[shift:] + self._names[:shift]:
                    self._say(f"round {index + 1} of {self._options.rounds}: {name}")
                    turns[name].append(self._turn(name))
        finally:
            for world in self._worlds.values():
                world.close()
        return {
            **asdict(self._case),
            "numel": PRESETS[self._case.params].numel,
            "transport": self._options.transport,
            "worlds": "resident" if self._resident else "fresh",
            "idle_cpu_seconds": self._idle_cpu,
            "contenders": turns,
        }

    def _turn(self, name: str) -> dict[str, Any]:
        """Let one contender take its steps of a round."""
        with self._world(name) as (world, warmup):
            warm = world.call("steps", warmup)
            others = [w for w in self._worlds.values() if w is not world]
            idle = sum(w.cpu_seconds() for w in others)
            busy, own = _machine_busy(), world.cpu_seconds()
            steps = world.call("steps", self._options.steps)
            busy, own = _machine_busy() - busy, world.cpu_seconds() - own
            self._idle_cpu += sum(w.cpu_seconds() for w in others) - idle
        return {
            "warmup": transposed(warm),
            "steps": transposed(steps),
            "foreign_cpu_seconds": max(busy - own, 0.0),
        }

    @contextlib.contextmanager
    def _world(self, name: str) -> Iterator[tuple[World, int]]:
        """Give a contender's world, and how many steps it has to take before it is measured."""
        if name in self._worlds:
            yield self._worlds[name], 0
            return
        world = World(
            name,
            self._case.ranks,
            StepWorker,
            name,
            self._case,
            device=self._case.device,
            env=contender_env(name, self._options.transport),
        )
        if self._resident:
            self._worlds[name] = world
            yield world, self._options.warmup
        else:
            with world:
                yield world, self._options.warmup

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(f"  {self._case.label()}, {text}", end="\r", soft_wrap=True)


def _machine_busy() -> float:
    """Return the processor seconds that everybody on this machine has taken."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _fits(case: Case, names: list[str]) -> bool:
    """Tell whether all worlds of a case fit into the memory that is free now."""
    if case.device != "cpu":
        return False
    whole = 4 * PRESETS[case.params].numel  # bytes in fp32
    state = 2 if case.optimizer == "adamw" else 0
    asleep = {
        "ddp": (2 + state) * case.ranks,
        "floor": case.ranks + state,
        "copies": 3 * case.ranks + state,
    }
    at_rest = sum(asleep.get(name, 1 + state) for name in names) * whole
    awake = 2 * case.ranks * whole  # a model being built, or parameters and gradients of a step
    processes = len(names) * case.ranks * 400 * 2**20
    return bool(at_rest + awake + processes < 0.6 * psutil.virtual_memory().available)


def _options() -> argparse.Namespace:
    made = parser(
        __doc__.splitlines()[0], "ours,fsdp2,fsdp1,ddp,floor", ("fp32", "bf16", "bf16-params")
    )
    made.add_argument("--rounds", type=positive_int, default=5, help="turns of a contender (5)")
    made.add_argument("--steps", type=positive_int, default=3, help="steps in a turn (3)")
    made.add_argument(
        "--warmup", type=positive_int, default=4, help="steps before a world is measured (4)"
    )
    made.add_argument(
        "--worlds",
        choices=("auto", "resident", "fresh"),
        default="auto",
        help="resident: all contenders stay in memory; fresh: each turn starts its processes "
        "anew; auto: resident where memory allows",
    )
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    matches = (Match(case, options, console).play() for case in cases(options))
    played = publish_each(console, "step_time", matches, TABLES["step_time"], options.json)
    return 1 if any(disagreement(case) for case in played) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
