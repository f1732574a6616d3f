"""Time of a step of Muon over several ranks: ours, and how others do it.

    python benchmarks/muon.py --params 150m --ranks 4 --rounds 5

Every contender updates the matrices of the hidden layers of a Llama, from the same weights with the
same gradients:

    ours         shardwise.optim.Muon on shardwise's fully_shard
    every        torch.optim.Muon on whole matrices, on every rank, without any communication
    muon-fsdp2   muon_fsdp2.Muon on torch's fully_shard
    torch        torch.optim.Muon on torch's fully_shard

They take turns, one step each. The time of a step is that of the slowest rank. The exit code is 1
if ours takes more than 0.35 of the time of every rank doing all the work on four ranks or more, or
if its weights differ from those of torch.optim.Muon.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from _models import PRESETS
from _muon_tables import CONTENDERS, muon_tables, too_slow
from _options import one_of, positive_int, positive_ints
from _report import announce, publish_each
from _worlds import World, stop_server
from shardwise.optim import Muon

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1


class MuonWorker:
    """One rank of a contender, with momentum from one step."""

    def __init__(self, name: str, params: str, ns_steps: int, seed: int) -> None:
        matrices = [
            nn.Parameter(torch.randn(shape, generator=_generator(seed, number)).mul_(0.02))
            for number, shape in enumerate(shapes(params))
        ]
        self._model = nn.ParameterList(matrices)
        if name == "ours":
            shardwise.fully_shard(self._model)
        elif name != "every":
            fully_shard(self._model)
        for number, param in enumerate(self._model):
            grad = torch.randn(param.shape, generator=_generator(seed + 1, number))
            if isinstance(param, DTensor):
                mesh = param.device_mesh
                grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
            param.grad = grad
        self._optimizer = _optimizer(name, list(self._model), ns_steps)
        self.step()

    def step(self) -> float:
        """Take a step; return its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - start

    def whole(self, number: int) -> torch.Tensor:
        """Return a matrix as a whole."""
        param = self._model[number].detach()
        return param.full_tensor() if isinstance(param, DTensor) else param


def shapes(params: str) -> list[tuple[int, int]]:
    """List the shapes of the matrices of hidden layers."""
    preset = PRESETS[params]
    hidden, inner = preset.hidden, preset.intermediate
    block = [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return block * preset.layers


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + number)


def _optimizer(name: str, params: list[Any], ns_steps: int) -> torch.optim.Optimizer:
    if name == "muon-fsdp2":
        from muon_fsdp2 import Muon as Theirs

        group = {"params": params, "use_muon": True, "ns_steps": ns_steps, "rms_scale": False}
        made: torch.optim.Optimizer = Theirs(
            [{**group, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}]
        )
        return made
    kind = Muon if name == "ours" else torch.optim.Muon
    return kind(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, ns_steps=ns_steps)


def play(ranks: int, params: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let the contenders take turns on one model."""
    # What muon-fsdp2 compiles needs a compiler of C++, and is a small part of its work.
    env = {"TORCHDYNAMO_DISABLE": "1"}
    with contextlib.ExitStack() as stack:
        settings = (params, options.ns_steps, options.seed)
        worlds = {
            name: stack.enter_context(World(name, ranks, MuonWorker, name, *settings, env=env))
            for name in options.contenders
        }
        seconds: dict[str, list[float]] = {name: [] for name in worlds}
        for _ in range(options.rounds):
            for name, world in worlds.items():
                seconds[name].append(max(world.call("step")))
        return {
            "ranks": ranks,
            "params": params,
            "ns_steps": options.ns_steps,
            "matrices": len(shapes(params)),
            "numel": sum(m * n for m, n in shapes(params)),
            "seconds": seconds,
            "difference": _difference(worlds, len(shapes(params))),
        }


def _difference(worlds: dict[str, World], count: int) -> float | None:
    """Return the largest difference between our weights and those of whole matrices."""
    if not {"ours", "every"} <= worlds.keys():
        return None
    pairs = (
        [worlds[name].call("whole", number)[0] for name in ("ours", "every")]
        for number in range(count)
    )
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--ranks", type=positive_ints, default=[4], help="world sizes, e.g. 2 or 2,4 (4)")
    add("--params", type=one_of(*PRESETS), default=["34m"], help=f"model: {', '.join(PRESETS)}")
    add("--contenders", type=one_of(*CONTENDERS), default=list(CONTENDERS), help="some of them")
    add("--ns-steps", type=positive_int, default=5, help="iterations of Newton-Schulz (5)")
    add("--rounds", type=positive_int, default=5, help="steps of a contender (5)")
    add("--seed", type=int, default=0, help="of weights and gradients (0)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    played = (play(ranks, params, options) for params in options.params for ranks in options.ranks)
    measured = publish_each(console, "muon", played, muon_tables, options.json)
    return 1 if any(map(too_slow, measured)) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        stop_server()
