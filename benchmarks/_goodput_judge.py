"""The loss of stored checkpoints on text that was held back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _worlds import World
from shardwise import checkpoint, fully_shard
from shardwise.app.recipes.core.build import make_adamw
from shardwise.app.recipes.core.model import build, initialize, next_token_loss
from shardwise.app.recipes.text.data import SEPARATOR, VOCAB_SIZE, load_text
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.diloco import DiLoCo
from shardwise.insight.planning.presets import LLAMAS
from shardwise.insight.schema.training import OptimizerConfig

JUDGED = 1024  # sequences


class Judge:
    """One process that evaluates models of one shape.

    Args:
        model: a preset of the recipes.
        length: tokens of a sequence.
    """

    def __init__(self, model: str, length: int) -> None:
        self._model: Any = build(LLAMAS[model].settings(), VOCAB_SIZE, SEPARATOR)
        fully_shard(self._model)
        initialize(self._model, 0)
        self._length = length
        self._text = load_text((), length).validation

    def loss(self, path: Path, replicas: bool) -> float:
        """Return the loss of a checkpoint, in nats per token.

        Args:
            path: of the checkpoint.
            replicas: whether it is that of a replica, of which the outer parameters count.
        """
        if not replicas:
            checkpoint.load(path, self._model)
            return self._evaluated()
        inner = make_adamw(self._model, OptimizerConfig(lr=0.0))
        diloco = DiLoCo(self._model, inner, every=1, group=None)
        checkpoint.load(path, self._model, diloco)
        with diloco.outer_parameters():
            return self._evaluated()

    def _evaluated(self) -> float:
        each = range(JUDGED)
        return summed_loss(self._model, self._text, self._length, each, JUDGED) / JUDGED


@torch.no_grad()
def summed_loss(model: Any, text: Any, length: int, chosen: Sequence[int], count: int) -> float:
    """Return the sum of a model's losses on sequences that are spread evenly over a text.

    Args:
        model: evaluated from here on.
        text: that was held back.
        length: tokens of a sequence.
        chosen: the numbers of the sequences.
        count: how many there are.
    """
    model.eval()
    room, total = len(text) - length - 1, 0.0
    for first in range(0, len(chosen), 16):
        starts = [room * number // (count - 1) for number in chosen[first : first + 16]]
        rows = [text.read(start, length + 1) for start in starts]
        batch = torch.stack([torch.from_numpy(row) for row in rows])
        total += next_token_loss(model, batch).item() * len(rows)
    return total


def rounds_of(path: Path) -> int:
    """Return the outer steps behind the outer parameters of a replica's checkpoint."""
    where = ("optimizer", "diloco", "rounds")
    found = (value.value for value in read_manifest(path).values if value.path == where)
    return int(next(found)[0])


def judge(model: str, length: int, checkpoints: list[tuple[Path, bool]]) -> list[float]:
    """Return the loss of each checkpoint; see :meth:`Judge.loss`."""
    with World("judge", 1, Judge, model, length) as world:
        return [world.call("loss", *each)[0] for each in checkpoints]
