"""Speed of a training whose states are three times the memory that it is given.

    python benchmarks/offload.py --params 400m-deep --ranks 2 --tokens 1024 --folder /tmp

Three contenders train the same Llama in bf16 with fp32 masters and AdamW, and step in backward:

    memory   everything in memory, without a limit
    disk     masters and states in a file; all ranks together may use a third of their bytes
    all      parameters in a file, too; all ranks together may use less by as much as these are

They take turns, one step each. The time of a step is that of the slowest rank. The limit is one of
the kernel (a control group), so this runs as root on Linux. The exit code is 1 if one of the last
two has less than 0.6 of the speed of the first, or other parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _cgroup import Limited, limited
from _memory import pss
from _models import PRESETS, batches, build, groups
from _offload_tables import offload_tables, wrong
from _options import one_of, positive_int, positive_ints
from _report import announce, publish_each
from _worlds import World, stop_server
from shardwise import DiskOffloadPolicy, OffloadPolicy, fully_shard, materialize
from shardwise._torch import dtensor
from shardwise.base import devices
from shardwise.frontends.activation import checkpoint_module
from shardwise.optim import in_backward, offload

STATES = 12  # bytes of a parameter: its master and two moments
SHARDS = 2  # and of itself


class OffloadWorker:
    """One rank of a contender."""

    def __init__(
        self,
        group: Limited | None,
        place: str,
        policy: OffloadPolicy,
        params: str,
        tokens: int,
        staging: int,
    ) -> None:
        if group is not None:
            group.join()
        devices.return_freed_memory()
        model = build(params, 0, "meta").to(torch.bfloat16)
        for layer in model.model.layers:
            checkpoint_module(layer)
        for modules in groups(model):
            fully_shard(modules, offload_policy=policy)
        self._model = fully_shard(model, offload_policy=policy)
        torch.manual_seed(0)
        materialize(self._model)
        self._offloaded = offload(
            torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True),
            place,
            masters=torch.float32,
            staging=staging,
        )
        self._optimizer = in_backward(self._model, lambda _: self._offloaded)
        self._batches = batches(params, tokens, dist.get_rank(), 0)
        self._steps = 0

    def step(self) -> float:
        """Take a step; return its seconds."""
        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        dist.barrier()
        start = time.perf_counter()
        self._model(input_ids=batch, labels=batch).loss.backward()
        self._optimizer.step()
        return time.perf_counter() - start

    def kept(self) -> int:
        """Return the bytes of states and masters."""
        states = self._optimizer.state.values()
        return sum(
            dtensor.plain(value).nbytes
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )

    def memory(self) -> int:
        """Return the bytes of memory that are this rank's own."""
        return pss()

    def digest(self) -> str:
        """Return a digest of this rank's parameters."""
        made = hashlib.sha256()
        for param in self._model.parameters():
            made.update(dtensor.plain(param.detach()).view(torch.uint8).numpy().tobytes())
        return made.hexdigest()


def play(ranks: int, params: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders take turns on one model."""
    limit = int(STATES * PRESETS[params].numel / options.times)
    limits = {"disk": limit, "all": limit - SHARDS * PRESETS[params].numel}
    folder = options.folder.resolve()
    staging = options.staging * 2**20
    with contextlib.ExitStack() as stack:
        limited_to = {name: stack.enter_context(limited(limits[name])) for name in limits}
        worlds = {}
        for name in dict.fromkeys(["memory", *options.contenders]):
            place = "host" if name == "memory" else f"disk:{folder}"
            policy = DiskOffloadPolicy(folder) if name == "all" else OffloadPolicy()
            settings = (limited_to.get(name), place, policy, params, options.tokens, staging)
            world = World(name, ranks, OffloadWorker, *settings, exec_each=True)
            worlds[name] = stack.enter_context(world)
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        for turn in range(options.warmup + options.rounds):
            for name, world in worlds.items():
                took = max(world.call("step"))
                if turn >= options.warmup:
                    seconds[name].append(took)
        return {
            "ranks": ranks,
            "params": params,
            "numel": PRESETS[params].numel,
            "tokens": options.tokens,
            "staging": staging,
            "limits": {name: each for name, each in limits.items() if name in worlds},
            "seconds": seconds,
            "kept": sum(next(iter(worlds.values())).call("kept")),
            "digests": {name: world.call("digest") for name, world in worlds.items()},
            "peak": {
                name: limited_to[name].peak if name in limited_to else sum(world.call("memory"))
                for name, world in worlds.items()
            },
        }


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[2], help="world sizes, e.g. 2 or 2,4 (2)")
    add("--params", type=one_of(*PRESETS), default=["400m-deep"], help="models (400m-deep)")
    add("--tokens", type=positive_int, default=1024, help="tokens a rank and step (1024)")
    add("--times", type=float, default=3.0, help="states by the memory for all ranks (3)")
    add(
        "--contenders",
        type=one_of("disk", "all"),
        default=["disk", "all"],
        help="beside memory (both)",
    )
    add("--staging", type=positive_int, default=128, help="MiB of a rank for states (128)")
    add("--folder", type=Path, default=Path("/tmp"), help="on the disk to use (/tmp)")
    add("--rounds", type=positive_int, default=5, help="steps of a contender (5)")
    add("--warmup", type=positive_int, default=2, help="steps before these (2)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    played = (play(ranks, params, options) for params in options.params for ranks in options.ranks)
    measured = publish_each(console, "offload", played, offload_tables, options.json)
    found = [each for case in measured if (each := wrong(case))]
    console.print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
