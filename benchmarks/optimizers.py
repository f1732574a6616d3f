"""Optimizers on sharded models, beside their peers on torch's FSDP2: time, memory and loss.

    python benchmarks/optimizers.py --only steps --params 34m --rounds 9
    python benchmarks/optimizers.py --only loss --params 5m

Every contender has a model that is sharded over all ranks, by ours or by FSDP2, and the settings
that ``shardwise train`` takes by default. ``TITLES`` lists them; those whose
packages are missing (torchao, muon-fsdp2, lion-pytorch) are left out.

**Steps.** The optimizers take turns, each in processes of its own, on gradients that are drawn anew
for each step. The time of a step is that of the slowest rank. After all rounds, the kernel counts
the memory of one more step, in which the allocator gives freed memory back at once.

**Loss.** All train on the source code of Python's standard library, byte by byte, from the same
weights on the same batches. The exit code is 1 if AdamW or SGD of torch have other losses on ours
than on FSDP2, with two ranks.
"""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from _contenders import CONTENDERS, Case
from _memory import give_back, malloc_promptly, peak_rss, reset_peak_rss, rss, state_bytes
from _options import Content, end, one_of, parser, positive_int, run
from _report import Table, compared, mib
from _turns import Turns
from _worlds import World
from shardwise.app.recipes.core.build import learning_rate
from shardwise.insight.optimizers import make_optimizer
from shardwise.insight.schema.training import OptimizerConfig, OptimizerName
from shardwise.optim import muon_groups

PARTS = ("steps", "loss")
ADAMW = "fsdp2-adamw"
LAST = 50  # steps whose mean loss counts
WARMUP = 2  # steps: the first makes states, and may compile
GRADIENT = 1e-2  # root of the mean square of an element
LENGTH = 256  # tokens of a sequence
ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pools of processes beside the ranks
TITLES = {
    "ours-adamw": "torch AdamW, fused",
    "fsdp2-adamw": "torch AdamW, fused",
    "ours-adamw8bit": "shardwise AdamW8bit",
    "fsdp2-adamw8bit": "torchao AdamW8bit",
    "ours-muon": "shardwise Muon",
    "fsdp2-muon": "muon-fsdp2",
    "ours-lion": "shardwise Lion",
    "fsdp2-lion": "lion-pytorch",
    "ours-adafactor": "shardwise Adafactor",
    "ours-sgd": "torch SGD, momentum",
    "fsdp2-sgd": "torch SGD, momentum",
}
"""Contenders, by what shards the model and what ``shardwise train`` calls the optimizer."""
_PACKAGES = {
    "fsdp2-adamw8bit": "torchao.optim",
    "fsdp2-muon": "muon_fsdp2",
    "fsdp2-lion": "lion_pytorch",
}
"""The modules of those that are not torch's or ours."""


def settings_of(name: str, lr: float) -> OptimizerConfig:
    """Return the settings of a contender.

    Args:
        name: the contender.
        lr: the learning rate of AdamW; that of others follows from it.
    """
    kind = OptimizerName(name.partition("-")[2])
    return replace(OptimizerConfig(lr=lr).usual_for(kind), algorithm=kind)


def make(name: str, model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Make the optimizer of a contender."""
    if name not in _PACKAGES:
        return make_optimizer(model, settings)
    module = importlib.import_module(_PACKAGES[name])
    made: torch.optim.Optimizer
    if name == "fsdp2-muon":
        made = module.Muon(_groups_of_muon(model, settings))
    else:
        kind = module.AdamW8bit if name == "fsdp2-adamw8bit" else module.Lion
        # The parameter groups that AdamW has, with their weight decay.
        adamw = make_optimizer(model, replace(settings, algorithm=OptimizerName.ADAMW))
        keys = ("params", "weight_decay")
        groups = [{key: each[key] for key in keys} for each in adamw.param_groups]
        made = kind(groups, lr=settings.lr, betas=settings.betas)
    return made


def installed() -> list[str]:
    """Return the contenders whose packages are there."""
    packages = {name: _PACKAGES.get(name, "torch").partition(".")[0] for name in TITLES}
    return [name for name in TITLES if importlib.util.find_spec(packages[name]) is not None]


def _groups_of_muon(model: nn.Module, settings: OptimizerConfig) -> list[dict[str, Any]]:
    groups = []
    for found in muon_groups(model):
        group = {"params": [param for _, param in found["params"]], "lr": settings.lr}
        group["weight_decay"] = found.get("weight_decay", settings.weight_decay)
        if found["algorithm"] == "muon":
            group |= {"use_muon": True, "momentum": 0.95, "rms_scale": True}
        else:
            group |= {"use_muon": False, "betas": settings.betas, "eps": 1e-8}
        groups.append(group)
    return groups


def text() -> torch.Tensor:
    """The source code of the standard library as bytes; int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(each for each in folder.glob("*.py") if each.is_file())
    return torch.frombuffer(
        bytearray(b"\n".join(each.read_bytes() for each in files)), dtype=torch.uint8
    ).long()


def batch(data: torch.Tensor, tokens: int, seed: int, step: int) -> torch.Tensor:
    """Draw the sequences of a step; int64 of shape ``(tokens // LENGTH, LENGTH)``."""
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
    at = torch.randint(len(data) - LENGTH, (tokens // LENGTH,), generator=generator)
    return torch.stack([data[start : start + LENGTH] for start in at.tolist()])


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, which torchao keeps in tensors."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class Worker:
    """One rank of a contender."""

    def __init__(self, name: str, case: Case, lr: float) -> None:
        self._trained = CONTENDERS[name.partition("-")[0]](case)
        self._settings = settings_of(name, lr)
        self._optimizer = make(name, self._trained.model, self._settings)
        self._trained.optimizer = self._optimizer
        self._rank, self._case = dist.get_rank(), case
        self._generator = torch.Generator().manual_seed(case.seed * case.ranks + self._rank)

    def step(self) -> float:
        """Take a step with random gradients; return its seconds."""
        self._draw_gradients()
        dist.barrier()
        start = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - start

    def step_bytes(self) -> int:
        """Take a step; return the bytes of memory that were taken only for as long as it ran.

        Later steps are slower.
        """
        malloc_promptly()
        self._draw_gradients()
        give_back()
        before = rss()
        reset_peak_rss()
        self._optimizer.step()
        return peak_rss() - before

    def state_bytes(self) -> int:
        """Count the bytes of states."""
        return state_bytes(self._optimizer)

    def shard_numel(self) -> int:
        """Count the elements of parameters of this rank."""
        return sum(param.to_local().numel() for param in self._trained.model.parameters())

    def train(self, steps: int) -> list[float]:
        """Train on this rank's part of each batch; return the loss of each step."""
        data, case = text(), self._case
        rate = learning_rate(self._settings, steps)
        losses = []
        for step in range(steps):
            set_lr(self._optimizer, rate(step + 1))
            sequences = batch(data, case.tokens, case.seed, step)
            loss = self._trained.forward(sequences[self._rank :: case.ranks])
            self._trained.backward(loss)
            nn.utils.clip_grad_norm_(self._trained.model.parameters(), self._settings.clip_grad)
            self._trained.update()
            losses.append(loss.item())
        return losses

    def _draw_gradients(self) -> None:
        for param in self._trained.model.parameters():
            param.grad = torch.zeros_like(param)
            param.grad.to_local().normal_(std=GRADIENT, generator=self._generator)


def play_steps(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Let contenders take turns; return the seconds of their steps, and bytes."""
    names = options.contenders

    def start(name: str) -> World:
        return World(name, case.ranks, Worker, name, case, options.lr, env=ENV)

    with Turns(names, start) as turns:
        seconds = turns.play(
            WARMUP + options.rounds, lambda name, world, _: max(world.call("step"))
        )
        counted = {
            what: {name: turns.worlds[name].call(what) for name in names}
            for what in ("state_bytes", "shard_numel", "step_bytes")
        }
    took = {name: rounds[WARMUP:] for name, rounds in seconds.items()}
    return {"part": "steps", **case.facts(), "seconds": took, **counted}


def play_loss(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model with each optimizer, one after the other; return the mean loss of each step."""
    losses, rates = {}, {}
    for name in options.contenders:
        arguments = (name, case, options.lr)
        with World(name, case.ranks, Worker, *arguments, env=ENV, timeout=3600) as world:
            by_rank = world.call("train", options.steps)
        losses[name] = [sum(step) / case.ranks for step in zip(*by_rank, strict=True)]
        rates[name] = settings_of(name, options.lr).lr
    asked = {"steps": options.steps, "lr": options.lr}
    return {"part": "loss", **case.facts(), **asked, "rates": rates, "losses": losses}


def differences(case: Content) -> list[str]:
    """Name the kinds of optimizers of torch whose losses depend on what shards the model.

    Both runtimes reduce gradients of two ranks alike, and run the same optimizer.
    """
    if case["part"] != "loss" or case["ranks"] != 2:
        return []
    losses = case["losses"]
    both = [kind for kind in ("adamw", "sgd") if {f"ours-{kind}", f"fsdp2-{kind}"} <= set(losses)]
    return [kind for kind in both if losses[f"ours-{kind}"] != losses[f"fsdp2-{kind}"]]


def tables(cases: list[Content]) -> list[Table]:
    """Make a table of each case of steps, and one of the losses of each model."""
    models: dict[str, list[Content]] = {}
    for case in cases:
        if case["part"] == "loss":
            models.setdefault(case["params"], []).append(case)
    steps = (step_table(case) for case in cases if case["part"] == "steps")
    return [*steps, *map(loss_table, models.values())]


def step_table(case: Content) -> Table:
    """Show a case of steps."""

    def peer(name: str) -> str:
        found = f"fsdp2-{name.partition('-')[2]}"
        return found if found != name else ""

    def state(name: str) -> str:
        pairs = zip(case["state_bytes"][name], case["shard_numel"][name], strict=True)
        return f"{max(held / own for held, own in pairs):.2f}"

    seconds = case["seconds"]
    return compared(
        f"A step of the optimizer: {case['numel'] / 1e6:.1f} M parameters, {case['ranks']} ranks, "
        "fp32, ZeRO-3",
        ("optimizer", "ms", 1),
        {name: [1e3 * each for each in took] for name, took in seconds.items()},
        TITLES,
        peers={"x AdamW": ADAMW, "x peer": peer},
        beside={
            "sharded by": _shards,
            "bytes of states": state,
            "MiB of a step": lambda name: mib(max(case["step_bytes"][name])),
        },
        notes=[
            f"Medians of {len(next(iter(seconds.values())))} steps, of the slowest rank; "
            "contenders take turns. AdamW is torch's, fused, on FSDP2; a peer has the same kind of "
            "optimizer, on FSDP2.",
            "Bytes of states are those of a parameter's element. The last column is the memory of "
            "a rank that a step takes for as long as it runs, beside parameters, gradients and "
            "states.",
        ],
    )


def loss_table(cases: list[Content]) -> Table:
    """Show the losses of a model, whose cases have several seeds."""
    first = cases[0]
    shown = Table(
        f"Loss after {first['steps']} steps: {first['numel'] / 1e6:.1f} M parameters, "
        f"{first['ranks']} ranks, ZeRO-3, {first['tokens']} tokens a step",
        ["optimizer", "sharded by", "lr", "loss", "against AdamW"],
    )

    def last(name: str) -> list[float]:
        return [fmean(case["losses"][name][-LAST:]) for case in cases if name in case["losses"]]

    for name in first["losses"]:
        pairs = zip(last(name), last(ADAMW), strict=False)  # none, where AdamW was not asked for
        apart = ", ".join(f"{mine / theirs - 1:+.1%}" for mine, theirs in pairs)
        loss = ", ".join(f"{each:.3f}" for each in last(name))
        cells = [TITLES[name], _shards(name), f"{first['rates'][name]:g}", loss]
        shown.rows.append([*cells, "" if name == ADAMW else apart])
    several = " Several figures in a cell are of several seeds." if len(cases) > 1 else ""
    shown.notes.append(f"Means of the last {min(LAST, first['steps'])} steps.{several}")
    for kind in sorted({kind for case in cases for kind in differences(case)}):
        shown.notes.append(f"Losses of torch's {kind} DIFFER between runtimes.")
    return shown


def _shards(name: str) -> str:
    return {"ours": "shardwise", "fsdp2": "torch FSDP2"}[name.partition("-")[0]]


def _cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for preset in options.params:
        case = Case(options.ranks, preset, tokens=options.tokens)
        if options.only != "loss":
            yield play_steps(case, options)
        if options.only != "steps":
            seeds = (replace(case, seed=seed) for seed in range(options.seeds))
            yield from (play_loss(each, options) for each in seeds)


def main() -> int:
    made = parser(__doc__, params="5m", rounds=9)
    add = made.add_argument
    add("--only", choices=PARTS, help="steps, with memory, or loss (both)")
    add("--contenders", type=one_of(*TITLES), help="some of " + ", ".join(TITLES))
    add("--ranks", type=positive_int, default=2, help="world size (2)")
    add("--steps", type=positive_int, default=500, help="steps of training (500)")
    add("--tokens", type=positive_int, default=512, help="tokens of a step of training (512)")
    add("--lr", type=float, default=2e-3, help="AdamW's, from which others follow (0.002)")
    add("--seeds", type=positive_int, default=1, help="trainings with each optimizer (1)")
    options = made.parse_args()
    if options.tokens % (LENGTH * options.ranks):
        made.error(f"--tokens: expected a multiple of {LENGTH * options.ranks}, {LENGTH} a rank")
    options.contenders = options.contenders or installed()
    return run("optimizers", options, lambda say: _cases(options), tables, differences)


if __name__ == "__main__":
    end(main)
