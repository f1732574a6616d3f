"""What a whole step costs the host where there is nothing to move: by part and kind of AdamW.

    python benchmarks/host_step.py

The model is 64 linear layers of 8 x 8 on one rank, a group each. A step is forward and backward,
clipping, the optimizer and ``zero_grad``. An unsharded model, ours and FSDP2's take turns in one
process. What counts is processor time.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from _options import end, parser, positive_int, run
from _report import Table, ratio
from _worlds import World
from overhead import WIDTH, shard

TITLES = {"floor": "unsharded", "ours": "shardwise", "fsdp2": "torch FSDP2"}
KINDS: dict[str, dict[str, Any]] = {
    "torch's default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PARTS = ("forward and backward", "clipping", "optimizer", "zero_grad")


class StepsWorker:
    """One rank with the models and optimizers of all contenders."""

    def __init__(self, groups: int) -> None:
        torch.set_num_threads(1)
        self._input = torch.ones(2, WIDTH)
        self._trained = {
            f"{kind}, {name}": self._make(name, groups, options)
            for kind, options in KINDS.items()
            for name in TITLES
        }

    def rounds(self, count: int) -> dict[str, list[list[float]]]:
        """Let all take turns of a step; return the processor seconds of its parts."""
        found: dict[str, list[list[float]]] = {name: [] for name in self._trained}
        for _ in range(count):
            for name, (model, optimizer, clip) in self._trained.items():
                found[name].append(self._step(model, optimizer, clip))
        return found

    def _make(self, name: str, groups: int, options: dict[str, Any]) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(groups)))
        shard(name, model)
        clip: Any = nn.utils.clip_grad_norm_
        if name == "ours":
            clip = importlib.import_module("shardwise").clip_grad_norm_
        return model, torch.optim.AdamW(model.parameters(), **options), clip

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any) -> list[float]:
        params = list(model.parameters())
        parts: list[Callable[[], Any]] = [
            lambda: model(self._input).sum().backward(),
            lambda: clip(params, 1.0),
            optimizer.step,
            optimizer.zero_grad,
        ]
        seconds = []
        for part in parts:
            start = time.process_time()
            part()
            seconds.append(time.process_time() - start)
        return seconds


def tables(cases: list[dict[str, Any]]) -> list[Table]:
    """Make a table with a row for each kind of optimizer and contender."""
    made = []
    for case in cases:
        columns = ["AdamW", "contender", *PARTS, "whole", "x unsharded", "x FSDP2"]
        table = Table(f"A step of {case['groups']} tiny groups on one rank (µs)", columns)
        rounds: dict[str, list[list[float]]] = case["seconds"]
        wholes = {name: [sum(parts) for parts in found] for name, found in rounds.items()}
        for kind in KINDS:
            for name, title in TITLES.items():
                own = f"{kind}, {name}"
                parts = [median(part) for part in zip(*rounds[own], strict=True)]
                cells = [f"{1e6 * each:.0f}" for each in (*parts, median(wholes[own]))]
                peers = [
                    ratio(wholes[own], wholes[f"{kind}, {peer}"]) for peer in ("floor", "fsdp2")
                ]
                table.rows.append([kind, title, *cells, *peers])
        made.append(table)
    return made


def play(groups: int, rounds: int) -> dict[str, Any]:
    """Let all contenders take turns; return the raw numbers."""
    with World("together", 1, StepsWorker, groups) as world:
        world.call("rounds", 3)
        (seconds,) = world.call("rounds", rounds)
    return {"groups": groups, "seconds": seconds}


def main() -> int:
    made = parser(__doc__, rounds=25)
    made.add_argument("--groups", type=positive_int, default=64, help="groups of the model (64)")
    options = made.parse_args()
    return run("host_step", options, lambda say: [play(options.groups, options.rounds)], tables)


if __name__ == "__main__":
    end(main)
