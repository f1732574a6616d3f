"""AdamW with moments of eight bits: memory of its states, time of its step, and the loss.

    python benchmarks/adamw8bit.py --params 5m,34m
    python benchmarks/adamw8bit.py --only loss --params 10m --steps 500

Steps are those of one process on all parameters of a Llama, with gradients that stay the same. The
contenders take turns in that process: torch's fused AdamW, ours, and torchao's ``AdamW8bit``, which
compiles its step, if torchao is installed. The time of the first step, in which it does so, is not
counted.

The loss is that of training the model on the source code of Python's standard library, byte by
byte. Every contender has the same weights in the beginning and the same batches. ``adamw-foreach``
is AdamW with other rounding, and shows how far curves part by that alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _adamw8bit_tables import adamw8bit_tables
from _models import PRESETS, build
from _options import one_of, positive_int
from _report import announce, document, publish

Params = list[nn.Parameter]
PARTS = ("steps", "loss")
WARM_UP = 20  # steps in which the learning rate grows


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


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Count the bytes of all states."""
    return sum(_bytes(value) for state in optimizer.state.values() for value in state.values())


def _bytes(value: Any) -> int:
    if hasattr(value, "codes"):  # torchao's
        return int(value.codes.nbytes + value.scale.nbytes + value.qmap.nbytes)
    return int(value.nbytes)


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


def text() -> torch.Tensor:
    """The source code of the standard library as bytes; int64."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(each for each in folder.glob("*.py") if each.is_file())
    return torch.frombuffer(
        bytearray(b"\n".join(each.read_bytes() for each in files)), dtype=torch.uint8
    ).long()


def play_loss(
    preset: str, names: list[str], steps: int, tokens: int, lr: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train a model with each optimizer; return the loss of each step."""
    data = text()
    losses: dict[str, list[float]] = {}
    length = 256
    for name in names:
        model = build(preset, seed=0)
        optimizer = OPTIMIZERS[name](list(model.parameters()), lr)
        generator = torch.Generator().manual_seed(0)
        losses[name] = []
        for step in range(steps):
            for group in optimizer.param_groups:
                factor = min(1.0, (step + 1) / WARM_UP)
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr * factor)
                else:
                    group["lr"] = lr * factor
            at = torch.randint(len(data) - length, (tokens // length,), generator=generator)
            batch = torch.stack([data[start : start + length] for start in at.tolist()])
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
            if (step + 1) % 50 == 0:
                say(f"{preset} {name} step={step + 1} loss={sum(losses[name][-50:]) / 50:.4f}")
    return {
        "part": "loss",
        "params": preset,
        "numel": PRESETS[preset].numel,
        "tokens": tokens,
        "lr": lr,
        "losses": losses,
    }


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--only", choices=PARTS, help="steps, with the memory of states, or loss (both)")
    add("--params", type=one_of(*PRESETS), default=["5m"], help="sizes of the model (5m)")
    add("--rounds", type=positive_int, default=9, help="turns of an optimizer (9)")
    add("--threads", type=positive_int, default=1, help="threads of the process (1)")
    add("--steps", type=positive_int, default=500, help="steps of training (500)")
    add("--tokens", type=positive_int, default=512, help="tokens of a step of training (512)")
    add("--lr", type=float, default=1e-3, help="learning rate of training (0.001)")
    add("--json", type=Path, metavar="FILE", help="write raw numbers here")
    return made.parse_args()


def main() -> int:
    options = _options()
    console = announce()
    torch.set_num_threads(options.threads)
    known = importlib.util.find_spec("torchao") is not None
    eight_bits = ["ours", "torchao"] if known else ["ours"]
    cases = []
    for preset in options.params:
        if options.only != "loss":
            cases.append(play_steps(preset, ["adamw", *eight_bits], options.rounds))
        if options.only != "steps":
            names = ["adamw", "ours", "adamw-foreach"]
            cases.append(
                play_loss(preset, names, options.steps, options.tokens, options.lr, console.print)
            )
    content = document("adamw8bit", cases)
    publish(console, content, adamw8bit_tables(content), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
