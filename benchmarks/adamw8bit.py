"""AdamW with moments of eight bits: memory of its states, time of its step, and the loss.

    python benchmarks/adamw8bit.py --params 5m,34m
    python benchmarks/adamw8bit.py --only loss --params 10m --seeds 3 --folder /tmp/kept

Steps are those of one process on all parameters of a Llama, with gradients that stay the same. The
contenders take turns in that process: torch's fused AdamW, ours, and torchao's ``AdamW8bit``, which
compiles its step, if torchao is installed. The time of the first step, in which it does so, is not
counted.

The loss is that of training the model on the source code of Python's standard library, byte by
byte. Every contender has the same weights in the beginning and the same batches. ``adamw-foreach``
is AdamW with other rounding, and shows how far curves part by that alone. With ``--folder``,
trainings that were interrupted go on; several processes may train different contenders there.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _adamw8bit_curves import Training, train
from _adamw8bit_picture import draw
from _adamw8bit_tables import adamw8bit_tables
from _memory import state_bytes
from _models import PRESETS, build
from _options import one_of, positive_int
from _report import announce, document, publish

Params = list[nn.Parameter]
PARTS = ("steps", "loss")


def _torchao(params: Params, lr: float) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

    made: torch.optim.Optimizer = AdamW8bit(params, lr=lr)
    return made


def _ours(params: Params, lr: float) -> torch.optim.Optimizer:
    from shardwise.optim import AdamW8bit

    return AdamW8bit(params, lr=lr)


OPTIMIZERS: dict[str, Callable[[Params, float], torch.optim.Optimizer]] = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "ours": _ours,
    "torchao": _torchao,
    "adamw-foreach": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
}


def play_steps(preset: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Let optimizers take turns on one set of parameters each; return seconds and bytes."""
    made = {}
    for name in names:
        model = build(preset, seed=0)
        params = list(model.parameters())
        generator = torch.Generator().manual_seed(0)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * 1e-2
        made[name] = OPTIMIZERS[name](params, 1e-5)
        made[name].step()  # makes states, and compiles
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            made[name].step()
            seconds[name].append(time.perf_counter() - start)
    return {
        "part": "steps",
        "params": preset,
        "numel": PRESETS[preset].numel,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "state_bytes": {name: state_bytes(each) for name, each in made.items()},
    }


def play_loss(
    preset: str, names: list[str], seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train a model with each optimizer; return the loss of each step."""
    trainings = [
        Training(preset, name, OPTIMIZERS[name], options.lr, seed, options.folder) for name in names
    ]
    train(trainings, options.steps, options.tokens, seed)
    return {
        "part": "loss",
        "params": preset,
        "numel": PRESETS[preset].numel,
        "tokens": options.tokens,
        "lr": options.lr,
        "seed": seed,
        "losses": {each.name: each.losses[: options.steps] for each in trainings},
    }


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--only", choices=PARTS, help="steps, with the memory of states, or loss (both)")
    add("--contenders", type=one_of(*OPTIMIZERS), help="some of " + ", ".join(OPTIMIZERS))
    add("--params", type=one_of(*PRESETS), default=["5m"], help="sizes of the model (5m)")
    add("--rounds", type=positive_int, default=9, help="turns of an optimizer (9)")
    add("--threads", type=positive_int, default=1, help="threads of the process (1)")
    add("--steps", type=positive_int, default=500, help="steps of training (500)")
    add("--tokens", type=positive_int, default=512, help="tokens of a step of training (512)")
    add("--lr", type=float, default=1e-3, help="learning rate of training (0.001)")
    add("--seeds", type=positive_int, default=1, help="trainings with each optimizer (1)")
    add("--folder", type=Path, help="keep trainings here, and go on from there")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    add("--picture", type=Path, metavar="FILE", help="draw losses here, as SVG or PNG")
    options = made.parse_args()
    if options.picture and options.only == "steps":
        made.error("--picture shows losses: leave out --only steps")
    return options


def main() -> int:
    options = _options()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    console = announce()
    torch.set_num_threads(options.threads)
    known = importlib.util.find_spec("torchao") is not None
    eight_bits = ["ours", "torchao"] if known else ["ours"]
    cases = []
    for preset in options.params:
        if options.only != "loss":
            others = options.contenders or eight_bits
            names = list(dict.fromkeys(["adamw", *others]))
            cases.append(play_steps(preset, names, options.rounds))
        if options.only != "steps":
            names = options.contenders or ["adamw", "ours", "adamw-foreach"]
            cases += [play_loss(preset, names, seed, options) for seed in range(options.seeds)]
    content = document("adamw8bit", cases)
    publish(console, content, adamw8bit_tables(content), options.json)
    if options.picture:
        draw(content, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
