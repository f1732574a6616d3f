"""What sharding costs where there is nothing to move: microseconds a group and step.

    python benchmarks/overhead.py --ranks 1,2

The model is 64 linear layers of 8 x 8, a group each, so its arithmetic and its bytes are next to
nothing, and what remains is the runtime: hooks, Python, and the fixed price of a collective. The
same forward and backward without sharding is taken off. No optimizer: it is not the runtime's.

A second table has the seconds that ``fully_shard`` takes for a model of many such groups.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _options import contender_env, end, parser, positive_int, run
from _report import Table, compared
from _turns import Turns, transposed
from _worlds import World

TITLES = {"ours": "shardwise", "fsdp2": "torch FSDP2"}
CONTENDERS = (*TITLES, "floor")
WIDTH = 8


class OverheadWorker:
    """One rank of a contender, taking steps of a model of tiny groups."""

    def __init__(self, name: str, groups: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self._synchronize = torch.cuda.synchronize if device == "cuda" else _nothing_to_wait_for
        self._name, self._device = name, device
        self._model = self._layers(groups)
        self._shard(self._model)
        self._input = torch.ones(2, WIDTH, device=device)

    def build(self, groups: int) -> float:
        """Shard a new model of ``groups`` layers; return the seconds that takes."""
        model = self._layers(groups)
        gc.collect()  # what the last one left
        dist.barrier()
        start = time.perf_counter()
        self._shard(model)
        return time.perf_counter() - start

    def steps(self, count: int) -> list[float]:
        """Take steps; return the seconds of each."""
        seconds = []
        for _ in range(count):
            dist.barrier()
            self._synchronize()
            start = time.perf_counter()
            self._model(self._input).sum().backward()
            self._synchronize()
            seconds.append(time.perf_counter() - start)
            self._model.zero_grad()
        return seconds

    def _layers(self, count: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=self._device) for _ in range(count)))

    def _shard(self, model: nn.Sequential) -> None:
        if self._name == "floor":
            return
        if self._name == "ours":
            from shardwise import fully_shard
        else:
            from torch.distributed.fsdp import fully_shard  # type: ignore[assignment]
        for layer in model:
            fully_shard(layer)
        fully_shard(model)


def _nothing_to_wait_for() -> None:
    """Take the place of a device's ``synchronize`` on CPUs."""


def play(ranks: int, options: argparse.Namespace, device: str = "cpu") -> dict[str, Any]:
    """Let all contenders of one world size take turns; return the raw numbers."""
    builds: dict[str, list[float]] = {name: [] for name in TITLES}

    def start(name: str) -> World:
        arguments = (name, ranks, OverheadWorker, name, options.groups, device)
        return World(*arguments, device=device, env=contender_env(name, options.transport))

    def turn(name: str, world: World, is_new: bool) -> list[float]:
        if is_new:
            world.call("steps", 5)
        return [max(step) for step in transposed(world.call("steps", options.steps))]

    with Turns(CONTENDERS, start) as turns:
        seconds = turns.play(options.rounds, turn)
        for _ in range(options.rounds):  # last, since what they leave slows steps down
            for name in builds:
                builds[name].append(max(turns.worlds[name].call("build", options.build)))
    return {
        "ranks": ranks,
        "groups": options.groups,
        "seconds": seconds,
        "build": {"groups": options.build, "seconds": builds},
    }


def overheads(case: dict[str, Any], name: str) -> list[float]:
    """Return the microseconds per group beyond the floor, for each round."""
    return [
        1e6 * (median(turn) - median(floor)) / case["groups"]
        for turn, floor in zip(case["seconds"][name], case["seconds"]["floor"], strict=True)
    ]


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    """Make a table of steps and one of building, with rows for each world size and contender."""
    if not cases:
        return []
    steps, builds = {}, {}
    for case in cases:
        for name in TITLES:
            row = f"{name} {case['ranks']}"
            steps[row] = overheads(case, name)
            builds[row] = case["build"]["seconds"][name]
    shown = (
        (
            f"Overhead of a group and step, {cases[0]['groups']} tiny groups (µs, over the "
            "unsharded step)",
            *("µs a group", 0, steps),
        ),
        (f"fully_shard of {cases[0]['build']['groups']} tiny groups (s)", "s", 2, builds),
    )
    return [
        compared(
            title,
            ("contender", unit, digits),
            values,
            {row: TITLES[row.split()[0]] for row in values},
            peers={"x FSDP2": lambda row: f"fsdp2 {row.split()[1]}"},
            beside={"ranks": lambda row: row.split()[1]},
        )
        for title, unit, digits, values in shown
    ]


def main() -> int:
    made = parser(__doc__, ranks="1,2", rounds=7, steps=20, transport="auto")
    add = made.add_argument
    add("--groups", type=positive_int, default=64, help="tiny groups in the model (64)")
    add("--build", type=positive_int, default=1000, help="groups of the model to shard (1000)")
    options = made.parse_args()
    cases = (play(ranks, options) for ranks in options.ranks)
    return run("overhead", options, lambda say: cases, tables)


if __name__ == "__main__":
    end(main)
