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
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwise.checkpoint
from _contenders import Case, Ours
from _memory import peak_rss, reset_peak_rss
from _models import PRESETS, batches
from _options import end, parser, run
from _tables import STALL_TITLES
from _turns import in_turns
from _worlds import World

WAYS = tuple(STALL_TITLES)
Wait = Callable[[], object]


class StallWorker:
    """One rank of a training that saves."""

    def __init__(self, params: str, tokens: int, seed: int) -> None:
        self._trained = Ours(Case(dist.get_world_size(), params, seed=seed))
        self._model, self._optimizer = self._trained.model, self._trained.optimizer
        self._batches = batches(params, tokens, dist.get_rank(), seed)
        self._others = dist.new_group(backend="gloo")  # DCP's thread must not use training's
        self._step(0)

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
        self._step(0)
        before = time.perf_counter()
        wait = begin[way](folder)
        stall = time.perf_counter() - before
        for index in range(1, steps):
            self._step(index)
        wait()
        seconds = time.perf_counter() - start
        dist.barrier()
        return {"stall": stall, "seconds": seconds, "peak": peak_rss()}

    def _step(self, index: int) -> None:
        loss = self._trained.forward(self._batches[index % len(self._batches)])
        self._trained.backward(loss)
        self._trained.update()

    def _save(self, folder: Path) -> Wait:
        shardwise.checkpoint.save(folder, self._model, self._optimizer)
        return lambda: None

    def _begin(self, folder: Path) -> Wait:
        return shardwise.checkpoint.async_save(folder, self._model, self._optimizer).result

    def _begin_dcp(self, folder: Path) -> Wait:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        return dcp.async_save(state, checkpoint_id=folder, process_group=self._others).result


def play(ranks: int, params: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let all ways take turns; return the raw numbers."""
    turns: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.folder) as root,
        World("shardwise", ranks, StallWorker, params, options.tokens, options.seed) as world,
    ):
        for way in WAYS:  # to warm up
            _turn(world, way, options.steps, Path(root, way))
        for _, way in in_turns(WAYS, options.rounds):
            turns[way].append(_turn(world, way, options.steps, Path(root, way)))
    return {
        "ranks": ranks,
        "params": params,
        "numel": PRESETS[params].numel,
        "tokens": options.tokens,
        "steps": options.steps,
        "turns": turns,
    }


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


def main() -> int:
    made = parser(
        *(__doc__,),
        ranks="2",
        params="34m",
        tokens=256,
        steps=6,
        rounds=7,
        folder=None,
        seed=0,
    )
    options = made.parse_args()
    each = product(options.params, options.ranks)
    return run("checkpoint_stall", options, lambda say: (play(r, p, options) for p, r in each))


if __name__ == "__main__":
    end(main)
