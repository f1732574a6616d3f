"""Trainings of one model with several optimizers, which take turns, step by step.

All of them have the same weights in the beginning and the same batches. With a folder, each
training is kept there every :data:`KEEP_EVERY` steps, and goes on from there when it is asked for
again; ``losses.jsonl`` gets a line for each step as it happens.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from _models import build

LENGTH = 256  # tokens of a sequence
WARM_UP = 20  # steps in which the learning rate grows
KEEP_EVERY = 50

Make = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]


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


class Training:
    """A training with one optimizer.

    Args:
        preset: the model.
        name: of the optimizer.
        make: makes it, from parameters and a learning rate.
        lr: the learning rate after the first steps.
        seed: of the weights.
        folder: where the training is kept; ``None``: nowhere.

    Attributes:
        name: the same.
        losses: of each step so far.
    """

    def __init__(
        self, preset: str, name: str, make: Make, lr: float, seed: int, folder: Path | None
    ) -> None:
        self.name, self._lr = name, lr
        self.losses: list[float] = []
        self._model = build(preset, seed=seed)
        self._optimizer = make(list(self._model.parameters()), lr)
        self._key = {"params": preset, "seed": seed, "optimizer": name}
        self._folder = folder
        self._kept = folder / f"{preset}-{seed}-{name}.pt" if folder else None
        if self._kept and self._kept.exists():
            kept = torch.load(self._kept, weights_only=False)
            self.losses = kept["losses"]
            self._model.load_state_dict(kept["model"])
            self._optimizer.load_state_dict(kept["optimizer"])

    def step(self, tokens: torch.Tensor) -> None:
        """Train on a batch."""
        factor = min(1.0, (len(self.losses) + 1) / WARM_UP)
        set_lr(self._optimizer, self._lr * factor)
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())
        if self._folder and self._kept:
            line = self._key | {"step": len(self.losses), "loss": self.losses[-1]}
            with (self._folder / "losses.jsonl").open("a") as journal:
                journal.write(json.dumps(line) + "\n")
            if len(self.losses) % KEEP_EVERY == 0:
                self.keep()

    def keep(self) -> None:
        """Write the training to its folder, whole or not at all."""
        if self._kept is None:
            return
        draft = self._kept.with_name(f"{self._kept.name}.{os.getpid()}.part")
        state: dict[str, Any] = {"losses": self.losses, "model": self._model.state_dict()}
        torch.save(state | {"optimizer": self._optimizer.state_dict()}, draft)
        draft.replace(self._kept)


def train(trainings: list[Training], steps: int, tokens: int, seed: int) -> None:
    """Let trainings take turns, until each has done so many steps.

    Args:
        trainings: some may be ahead of others.
        steps: that many.
        tokens: of a step.
        seed: of the batches.
    """
    data = text()
    for step in range(steps):
        sequences = batch(data, tokens, seed, step)
        for each in trainings:
            if len(each.losses) == step:
                each.step(sequences)
    for each in trainings:
        each.keep()
