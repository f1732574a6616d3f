"""How long a training waits for a checkpoint: written at once, in the background, by torch's DCP.

    python benchmarks/checkpoint_stall.py --params 34m --ranks 2

A turn is the same number of training steps of the same model, with AdamW; after the first, one
checkpoint is begun. It ends when the checkpoint is on the disk. ``steps`` saves nothing: what a
turn of the others takes beyond it, in the same round, is what the checkpoint costs in all, the
steps that it slows down included. In each round all take turns; who begins changes from round to
round. *x step* compares the median step during which the checkpoint was being written with one of
``steps``. The floor is ``dd``, which writes as many bytes of nothing, without a copy or a checksum.
Extra memory is the highest resident memory of a turn, less that of ``steps``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shardwise.checkpoint
from _contenders import Case
from _memory import peak_rss, reset_peak_rss
from _options import end, one_of, parser, run, step_cases
from _report import Table, compared, mib, quartiles
from _turns import StepWorker, in_turns, slowest
from _worlds import World
from checkpoint import state_for_dcp

TITLES = {
    "steps": "steps alone",
    "sync": "shardwise, save",
    "async": "shardwise, async_save",
    "dcp": "torch DCP, async_save",
    "dcp-process": "torch DCP, async_save, process",
    "floor": "dd beside the training",
}


class Begun(Protocol):
    """A checkpoint that has been begun."""

    def done(self) -> bool:
        """Whether it is on the disk."""

    def result(self) -> object:
        """Wait until it is."""


class Disk:
    """``dd`` that writes some bytes to the disk, in a process of its own."""

    def __init__(self, path: Path, nbytes: int) -> None:
        path.parent.mkdir(exist_ok=True)
        size = [f"count={nbytes}", "iflag=count_bytes", "bs=4M", "conv=fsync", "status=none"]
        self._process = subprocess.Popen(["dd", "if=/dev/zero", f"of={path}", *size])

    def done(self) -> bool:
        """Whether they are on the disk."""
        return self._process.poll() is not None

    def result(self) -> None:
        """Wait until they are.

        Raises:
            ValueError: they could not be written.
        """
        if self._process.wait():
            raise ValueError(f"dd: found exit code {self._process.returncode}, expected 0")


class StallWorker(StepWorker):
    """One rank of a training that saves."""

    def __init__(self, case: Case) -> None:
        super().__init__("ours", case)
        self._model, self._optimizer = self._contender.model, self._contender.optimizer
        self._nbytes = 12 * case.numel // case.ranks
        # DCP starts a process, which those that end with their parent may not.
        multiprocessing.current_process().daemon = False
        self._others = dist.new_group(backend="gloo")  # DCP's thread must not use training's
        self._contender.step(self._next())

    def turn(self, way: str, steps: int, folder: Path) -> dict[str, float]:
        """Train, and save once meanwhile.

        Returns:
            Seconds for which the call to save held the training up, seconds of the whole turn, of
            the median step that ended before the checkpoint was on the disk (for ``steps``, of
            all; 0 if there is none), and the highest resident memory in bytes.
        """
        begin: dict[str, Callable[[Path], Begun]] = {
            "steps": self._begin_nothing,
            "sync": self._save,
            "async": self._begin,
            "dcp": self._begin_dcp,
            "dcp-process": self._begin_dcp_process,
            "floor": lambda folder: Disk(folder / str(dist.get_rank()), self._nbytes),
        }
        reset_peak_rss()
        dist.barrier()
        start = time.perf_counter()
        self._contender.step(self._next())
        before = time.perf_counter()
        begun = begin[way](folder)
        stall = time.perf_counter() - before
        beside = []
        for _ in range(1, steps):
            begins = time.perf_counter()
            self._contender.step(self._next())
            if way == "steps" or not begun.done():
                beside.append(time.perf_counter() - begins)
        begun.result()
        seconds = time.perf_counter() - start
        dist.barrier()
        step = median(beside) if beside else 0.0
        return {"stall": stall, "seconds": seconds, "step": step, "peak": peak_rss()}

    def _begin_nothing(self, folder: Path | None = None) -> Begun:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _save(self, folder: Path) -> Begun:
        shardwise.checkpoint.save(folder, self._model, self._optimizer)
        return self._begin_nothing()

    def _begin(self, folder: Path) -> Begun:
        return shardwise.checkpoint.async_save(folder, self._model, self._optimizer)

    def _begin_dcp(
        self, folder: Path, where: AsyncCheckpointerType = AsyncCheckpointerType.THREAD
    ) -> Begun:
        state = state_for_dcp(self._model, self._optimizer)
        saving: Any = dcp.async_save  # type: ignore[attr-defined]
        group = {"process_group": self._others, "async_checkpointer_type": where}
        return saving(state, checkpoint_id=folder, **group)  # type: ignore[no-any-return]

    def _begin_dcp_process(self, folder: Path) -> Begun:
        return self._begin_dcp(folder, AsyncCheckpointerType.PROCESS)


def play(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Let all ways take turns in one world; return the raw numbers."""
    turns: dict[str, list[list[dict[str, float]]]] = {
        way: [] for way in ["steps", *options.contenders]
    }
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.folder) as root,
        World("shardwise", case.ranks, StallWorker, case) as world,
    ):
        for at, way in in_turns(turns, 1 + options.rounds):
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

    def slowed(way: str) -> str:
        pairs = zip(figures(way, "step"), figures("steps", "step"), strict=True)
        ratios = [mine / alone for mine, alone in pairs if mine]
        return f"{median(ratios):.2f}" if ratios else ""

    compares = "step" in case["turns"]["steps"][0][0]  # documents have it since 2026-11-30
    return compared(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{12 * case['numel'] / 1e9:.2f} GB saved in {case['steps']} steps",
        ("way", "stall s", 2),
        {way: figures(way, "stall") for way in case["turns"] if way != "steps"},
        TITLES,
        peers={"x save": "sync"},
        beside={
            **({"x step": slowed} if compares else {}),
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
    accepted = parser(__doc__, ranks="2", params="34m", **usual)
    ways = [way for way in TITLES if way != "steps"]
    help_ = f"some of {', '.join(ways)}"
    accepted.add_argument("--contenders", type=one_of(*ways), default=ways, help=help_)
    options = accepted.parse_args()
    cases = (play(case, options) for case in step_cases(options))
    return run("checkpoint_stall", options, lambda say: cases, lambda cases: [*map(table, cases)])


if __name__ == "__main__":
    end(main)
