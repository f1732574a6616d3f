"""How long a training waits for a checkpoint: written at once, in the background, by torch's DCP.

    python benchmarks/checkpoint_stall.py --params 34m --ranks 2

A turn is the same number of training steps of the same model, with AdamW; after the first, one
checkpoint is begun. It ends when the checkpoint is on the disk. ``steps`` saves nothing: what a
turn of the others takes beyond it, in the same round, is what the checkpoint costs in all, the
steps that it slows down included. In each round all take turns; who begins changes from round to
round. Extra memory is the highest resident memory of a turn, less that of ``steps``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardwise.checkpoint
from _contenders import Case
from _memory import peak_rss, reset_peak_rss
from _options import end, parser, run, step_cases
from _report import Table, compared, mib, quartiles
from _turns import StepWorker, in_turns, slowest
from _worlds import World
from checkpoint import state_for_dcp

TITLES = {
    "steps": "steps alone",
    "sync": "shardwise, save",
    "async": "shardwise, async_save",
    "dcp": "torch DCP, async_save",
}
Wait = Callable[[], object]


class StallWorker(StepWorker):
    """One rank of a training that saves."""

    def __init__(self, case: Case) -> None:
        super().__init__("ours", case)
        self._model, self._optimizer = self._contender.model, self._contender.optimizer
        self._others = dist.new_group(backend="gloo")  # DCP's thread must not use training's
        self._contender.step(self._next())

    def turn(self, way: str, steps: int, folder: Path) -> dict[str, float]:
        """Train, and save once meanwhile.

        Returns:
            Seconds for which the call to save held the training up, seconds of the whole turn, and
            the highest resident memory in bytes.
        """
        begin: dict[str, Callable[[Path], Wait]] = {
            "steps": lambda folder: lambda: None,
            "sync": self._save,
            "async": self._begin,
            "dcp": self._begin_dcp,
        }
        reset_peak_rss()
        dist.barrier()
        start = time.perf_counter()
        self._contender.step(self._next())
        before = time.perf_counter()
        wait = begin[way](folder)
        stall = time.perf_counter() - before
        for _ in range(1, steps):
            self._contender.step(self._next())
        wait()
        seconds = time.perf_counter() - start
        dist.barrier()
        return {"stall": stall, "seconds": seconds, "peak": peak_rss()}

    def _save(self, folder: Path) -> Wait:
        shardwise.checkpoint.save(folder, self._model, self._optimizer)
        return lambda: None

    def _begin(self, folder: Path) -> Wait:
        return shardwise.checkpoint.async_save(folder, self._model, self._optimizer).result

    def _begin_dcp(self, folder: Path) -> Wait:
        state = state_for_dcp(self._model, self._optimizer)
        saving: Any = dcp.async_save  # type: ignore[attr-defined]
        begun = saving(state, checkpoint_id=folder, process_group=self._others)
        return begun.result  # type: ignore[no-any-return]


def play(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Let all ways take turns in one world; return the raw numbers."""
    turns: dict[str, list[list[dict[str, float]]]] = {way: [] for way in TITLES}
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.folder) as root,
        World("shardwise", case.ranks, StallWorker, case) as world,
    ):
        for at, way in in_turns(TITLES, 1 + options.rounds):
            found = _turn(world, way, options.steps, Path(root, way))
            if at:  # the first round is to warm up
                turns[way].append(found)
    return {**case.facts(), "steps": options.steps, "turns": turns}


def _turn(world: World, way: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """One turn; the figures of all ranks.

    Raises:
        ValueError: nothing was saved.
    """
    by_rank: list[dict[str, float]] = world.call("turn", way, steps, folder)
    if way != "steps":
        if not any(folder.iterdir()):
            raise ValueError(f"{way}: found nothing in {folder}, expected a checkpoint")
        shutil.rmtree(folder)
    return by_rank


def table(case: dict[str, Any]) -> Table:
    """Show a case."""

    def figures(way: str, what: str) -> list[float]:
        return [slowest(turn, what) for turn in case["turns"][way]]

    def costs(way: str) -> list[float]:
        pairs = zip(figures(way, "seconds"), figures("steps", "seconds"), strict=True)
        return [mine - alone for mine, alone in pairs]

    def held(way: str) -> str:
        most, alone = (median(figures(each, "peak")) for each in (way, "steps"))
        return mib(max(0.0, most - alone), 0)

    return compared(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{12 * case['numel'] / 1e9:.2f} GB saved in {case['steps']} steps",
        ("way", "stall s", 2),
        {way: figures(way, "stall") for way in TITLES if way != "steps"},
        TITLES,
        peers={"x save": "sync"},
        beside={
            "in all s": lambda way: f"{median(costs(way)):.2f}",
            "quartiles of all": lambda way: quartiles(costs(way), 2),
            "extra MiB a rank": held,
        },
        notes=[
            f"{len(case['turns']['steps'])} rounds, the slowest rank of each; {case['steps']} "
            f"steps of {case['tokens']} tokens a rank take "
            f"{median(figures('steps', 'seconds')):.2f} s alone; ratios are medians of those "
            "within each round"
        ],
    )


def main() -> int:
    usual = {"tokens": 256, "steps": 6, "rounds": 7, "folder": None, "seed": 0}
    options = parser(__doc__, ranks="2", params="34m", **usual).parse_args()
    cases = (play(case, options) for case in step_cases(options))
    return run("checkpoint_stall", options, lambda say: cases, lambda cases: [*map(table, cases)])


if __name__ == "__main__":
    end(main)
