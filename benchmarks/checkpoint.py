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
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import shardwise.checkpoint
from _memory import peak_rss, reset_peak_rss, rss
from _models import PRESETS, build, groups
from _options import one_of, positive_int, positive_ints
from _report import announce, document, publish
from _tables import CHECKPOINT, CHECKPOINT_TITLES
from _worlds import World, stop_server

_CONTENDERS = tuple(CHECKPOINT_TITLES)


class CheckpointWorker:
    """One rank of a contender, with a model and an optimizer that has taken a step."""

    def __init__(self, name: str, params: str, seed: int) -> None:
        self._name = name
        self._model = build(params, seed)
        for group in groups(self._model):
            for module in group:
                shardwise.fully_shard(module)
        shardwise.fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        for parameter in self._model.parameters():
            parameter.grad = parameter.detach().clone()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def nbytes(self) -> int:
        """Return the bytes of this rank's shards and their optimizer state."""
        return sum(tensor.nbytes for tensor in self._locals())

    def save(self, folder: Path) -> tuple[float, int]:
        """Save; return the seconds, and the bytes of memory that it took beside the shards."""
        ways = {"ours": self._save_ours, "dcp": self._save_dcp, "floor": self._save_plainly}
        return _measured(lambda: ways[self._name](folder))

    def load(self, folder: Path, cold: bool) -> tuple[float, int]:
        """Load what was saved; return the same."""
        if cold and dist.get_rank() == 0:
            for path in folder.rglob("*"):
                if path.is_file():
                    _forget(path)
        ways = {"ours": self._load_ours, "dcp": self._load_dcp, "floor": self._load_plainly}
        return _measured(lambda: ways[self._name](folder))

    def digest(self) -> float:
        """Return the sum of everything that is saved, and spoil it, so that a load must mend it."""
        total = 0.0
        with torch.no_grad():
            for tensor in self._locals():
                total += float(tensor.double().sum())
                tensor.zero_()
        return total

    def _locals(self) -> list[torch.Tensor]:
        tensors = list(self._model.parameters())
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [each.to_local() if isinstance(each, DTensor) else each.detach() for each in tensors]

    def _save_ours(self, folder: Path) -> None:
        shardwise.checkpoint.save(folder, self._model, self._optimizer)

    def _load_ours(self, folder: Path) -> None:
        shardwise.checkpoint.load(folder, self._model, self._optimizer)

    def _save_dcp(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def _load_dcp(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

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


def _all(move: Callable[[memoryview], int | None], tensor: torch.Tensor) -> None:
    """Write or read all bytes of a tensor."""
    data = tensor.view(-1).view(torch.uint8).numpy().data
    while data.nbytes:
        data = data[move(data) or 0 :]


def _measured(action: Callable[[], None]) -> tuple[float, int]:
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


def play(ranks: int, params: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let all contenders take turns; return the raw numbers.

    Raises:
        ValueError: a contender did not load what it had saved.
    """
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in _CONTENDERS}
    worlds: dict[str, World] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as root:
        try:
            for name in _CONTENDERS:
                worlds[name] = World(name, ranks, CheckpointWorker, name, params, options.seed)
                _turn(worlds[name], Path(root, name), options.cold)  # to warm up
            for index in range(options.rounds):
                shift = index % len(_CONTENDERS)
                for name in _CONTENDERS[shift:] + _CONTENDERS[:shift]:
                    turns[name].append(_turn(worlds[name], Path(root, name), options.cold))
            nbytes = sum(worlds["ours"].call("nbytes"))
        finally:
            for world in worlds.values():
                world.close()
    return {
        "ranks": ranks,
        "params": params,
        "nbytes": nbytes,
        "cold": options.cold,
        "turns": turns,
    }


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
    return {
        "size": size,
        **{f"{what}_s": [s for s, _ in by_rank] for what, by_rank in _both(saved, loaded)},
        **{f"{what}_extra": [m for _, m in by_rank] for what, by_rank in _both(saved, loaded)},
    }


def _both(saved: list[Any], loaded: list[Any]) -> list[tuple[str, list[Any]]]:
    return [("save", saved), ("load", loaded)]


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[2], help="world sizes, e.g. 2 or 2,4")
    add("--params", type=one_of(*PRESETS), default=["150m"], help=f"models: {', '.join(PRESETS)}")
    add("--rounds", type=positive_int, default=7, help="turns of a contender (7)")
    add("--cold", action="store_true", help="drop files from the page cache before they are loaded")
    add("--folder", type=Path, help="on the disk to be measured (the one of temporary files)")
    add("--seed", type=int, default=0, help="of weights (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    cases = [play(ranks, params, options) for params in options.params for ranks in options.ranks]
    content = document("checkpoint", cases)
    publish(console, content, CHECKPOINT.of_cases(content), options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
