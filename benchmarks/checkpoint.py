"""Time and memory to save and to load: ours, torch's DCP, and plain writing and reading.

    python benchmarks/checkpoint.py --params 150m --ranks 2

The same model, sharded, with the state of AdamW: about 12 bytes a parameter. All contenders hold
the same shards and see their bytes onto the disk: the floor writes each rank's tensors one after
another into one file, and syncs it once; it has neither names, checksums nor a commit. Then each
loads what it has saved. In each round all take turns; who begins changes from round to round.

A load is warm, when the files are still in the page cache, unless ``--cold`` drops them from it.
Extra memory is the highest resident memory that the kernel saw meanwhile, less that of before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import shardwise.checkpoint
from _contenders import Case, Ours
from _memory import peak_rss, reset_peak_rss, rss
from _options import end, parser, run, step_cases
from _report import Table, compared, mib, ratio
from _turns import Turns
from _worlds import World

TITLES = {"ours": "shardwise", "dcp": "torch DCP", "floor": "plain files"}


class CheckpointWorker:
    """One rank of a contender, with a model and an optimizer that has taken a step."""

    def __init__(self, name: str, case: Case) -> None:
        self._name = name
        trained = Ours(case)
        self._model, self._optimizer = trained.model, trained.optimizer
        for parameter in self._model.parameters():
            parameter.grad = parameter.detach().clone()
        trained.update()

    def nbytes(self) -> int:
        """Return the bytes of this rank's shards and their optimizer state."""
        return sum(tensor.nbytes for tensor in self._locals())

    def save(self, folder: Path) -> tuple[float, int]:
        """Save; return the seconds, and the bytes of memory that it took beside the shards."""
        ways = {"ours": self._save_ours, "dcp": self._save_dcp, "floor": self._save_plainly}
        return measured(lambda: ways[self._name](folder))

    def load(self, folder: Path, cold: bool) -> tuple[float, int]:
        """Load what was saved; return the same."""
        if cold and dist.get_rank() == 0:
            for path in folder.rglob("*"):
                if path.is_file():
                    _forget(path)
        ways = {"ours": self._load_ours, "dcp": self._load_dcp, "floor": self._load_plainly}
        return measured(lambda: ways[self._name](folder))

    def digest(self) -> float:
        """Return the sum of everything that is saved, and spoil it, so that a load must mend it."""
        total = 0.0
        with torch.no_grad():
            for tensor in self._locals():
                total += float(tensor.double().sum())
                tensor.zero_()
        return total

    def _locals(self) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = list(self._model.parameters())
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in tensors]

    def _save_ours(self, folder: Path) -> None:
        shardwise.checkpoint.save(folder, self._model, self._optimizer)

    def _load_ours(self, folder: Path) -> None:
        shardwise.checkpoint.load(folder, self._model, self._optimizer)

    def _save_dcp(self, folder: Path) -> None:
        state = state_for_dcp(self._model, self._optimizer)
        dcp.save(state, checkpoint_id=folder)  # type: ignore[attr-defined]

    def _load_dcp(self, folder: Path) -> None:
        state = state_for_dcp(self._model, self._optimizer)
        dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **loaded)

    def _save_plainly(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with (folder / f"{dist.get_rank()}").open("xb", buffering=0) as file:
            for tensor in self._locals():
                _all(file.write, tensor)
            os.fsync(file.fileno())

    def _load_plainly(self, folder: Path) -> None:
        with (folder / f"{dist.get_rank()}").open("rb", buffering=0) as file:
            for tensor in self._locals():
                _all(file.readinto, tensor)


def state_for_dcp(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what torch's DCP saves."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _all(move: Callable[[memoryview], int | None], tensor: torch.Tensor) -> None:
    """Write or read all bytes of a tensor."""
    data = tensor.view(-1).view(torch.uint8).numpy().data
    while data.nbytes:
        data = data[move(data) or 0 :]


def measured(action: Callable[[], None]) -> tuple[float, int]:
    """Return the seconds of an action, and the bytes of memory that it took at most."""
    reset_peak_rss()
    before = rss()
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, peak_rss() - before


def _forget(path: Path) -> None:
    """Drop a file, which is on the disk, from the page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def play(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Let all contenders take turns; return the raw numbers.

    Raises:
        ValueError: a contender did not load what it had saved.
    """
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as root:

        def start(name: str) -> World:
            return World(name, case.ranks, CheckpointWorker, name, case)

        def turn(name: str, world: World, is_new: bool) -> dict[str, Any]:
            if is_new:  # to warm up
                _turn(world, Path(root, name), options.cold)
            return _turn(world, Path(root, name), options.cold)

        with Turns(TITLES, start) as turns:
            found = turns.play(options.rounds, turn)
            nbytes = sum(turns.worlds["ours"].call("nbytes"))
    return {**case.facts(), "nbytes": nbytes, "cold": options.cold, "turns": found}


def _turn(world: World, folder: Path, cold: bool) -> dict[str, Any]:
    """Save, load and delete; the figures of all ranks."""
    os.sync()  # nobody pays for what another left to be written
    saved = world.call("save", folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    before = world.call("digest")
    loaded = world.call("load", folder, cold)
    if world.call("digest") != before:
        raise ValueError(f"{world.name} did not load what it had saved")
    world.call("load", folder, False)  # since the digest spoils it
    shutil.rmtree(folder)
    found: dict[str, Any] = {"size": size}
    for what, by_rank in (("save", saved), ("load", loaded)):
        found[f"{what}_s"], found[f"{what}_extra"] = map(list, zip(*by_rank, strict=True))
    return found


def table(case: dict[str, Any]) -> Table:
    """Show a case."""
    rows = [f"{name} {what}" for what in ("save", "load") for name in TITLES]

    def figures(row: str, what: str) -> list[float]:
        name, action = row.split()
        return [max(turn[f"{action}_{what}"]) for turn in case["turns"][name]]

    seconds = {row: figures(row, "s") for row in rows}

    def faster(peer: str) -> Callable[[str], str]:
        return lambda row: ratio(seconds[f"{peer} {row.split()[1]}"], seconds[row])

    return compared(
        f"{case['params']} parameters with AdamW, {case['ranks']} ranks, "
        f"{case['nbytes'] / 1e9:.2f} GB",
        ("contender", "s", 2),
        seconds,
        {row: f"{TITLES[row.split()[0]]}, {row.split()[1]}" for row in rows},
        peers={},
        beside={
            "GB/s": lambda row: f"{case['nbytes'] / median(seconds[row]) / 1e9:.2f}",
            "x DCP": faster("dcp"),
            "x plain": faster("floor"),
            "extra MiB a rank": lambda row: mib(max(figures(row, "extra")), 0),
        },
        notes=[
            f"{len(case['turns']['ours'])} rounds, the slowest rank of each; files "
            f"{'dropped from' if case['cold'] else 'in'} the page cache when they are loaded; "
            "ratios are of throughput, medians of those within each round"
        ],
    )


def main() -> int:
    made = parser(__doc__, ranks="2", params="150m", rounds=7, folder=None, seed=0)
    cold = "drop files from the page cache before they are loaded"
    made.add_argument("--cold", action="store_true", help=cold)
    options = made.parse_args()
    cases = (play(case, options) for case in step_cases(options))
    return run("checkpoint", options, lambda say: cases, lambda cases: [*map(table, cases)])


if __name__ == "__main__":
    end(main)
