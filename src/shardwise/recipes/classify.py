"""Telling classes of pictures apart: the loss, and how well it is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwise.launch.world import World
from shardwise.recipes.pictures import Batch, Pictures
from shardwise.recipes.sharded import kept_between_forwards
from shardwise.transport.peers import naming_lost_peer


def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """What the model makes of pictures, float32 of shape (count, classes).

    Args:
        model: returns logits, or an output of ``transformers`` that has them.
        images: (count, channels, height, width).
    """
    output: Any = model(images)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy, a float32 scalar, in nats."""
    images, classes = batch
    return F.cross_entropy(logits_of(model, images), classes)


@dataclass(frozen=True)
class Scores:
    """How well classes were told apart.

    Attributes:
        loss: mean cross-entropy, in nats.
        confusion: how often what (row) was taken for what (column), int64 of shape (classes,
            classes).
        top5: part of the pictures of which the class was among the likeliest five.
    """

    loss: float
    confusion: torch.Tensor
    top5: float

    @property
    def accuracy(self) -> float:
        """Part of the pictures of which the class was the likeliest."""
        return self.confusion.diagonal().sum().item() / self.confusion.sum().item()

    def values(self) -> dict[str, float]:
        """For metrics; the likeliest five say something where there are more than ten classes."""
        values = {"validation_loss": self.loss, "accuracy": self.accuracy}
        return {**values, "accuracy_top5": self.top5} if len(self.confusion) > 10 else values


class Evaluation:
    """Judges models by pictures that are shared out over all ranks.

    Args:
        pictures: to judge by.
        classes: how many there are.
        batch_size: of this rank.
        world: this rank among all.
        device: where it computes.
    """

    def __init__(
        self, pictures: Pictures, classes: int, batch_size: int, world: World, device: torch.device
    ) -> None:
        self._pictures = pictures
        self._classes = classes
        self._batch_size = batch_size
        self._world = world
        self._device = device

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> Scores:
        """Judge a model. Every rank calls it, and gets the scores of all together."""
        mine = range(self._world.rank, len(self._pictures), self._world.size)
        # As many forwards on every rank, since a forward of a sharded model takes all.
        per_round = self._batch_size * self._world.size
        rounds = -(-len(self._pictures) // per_round)
        sums = torch.zeros(2, dtype=torch.float64)
        confusion = torch.zeros(self._classes**2, dtype=torch.int64)
        training = model.training
        model.eval()
        with kept_between_forwards(model):
            for turn in range(rounds):
                indices = mine[turn * self._batch_size : (turn + 1) * self._batch_size]
                # A rank that has none left looks at the first picture again, uncounted.
                images, classes = self._pictures.read(indices or [0], [0] * max(1, len(indices)))
                logits = logits_of(model, images.to(self._device)).cpu()
                if indices:
                    sums += self._tally(logits, classes, confusion)
        model.train(training)
        with naming_lost_peer(None, "the sum of scores"):
            dist.all_reduce(sums)
            dist.all_reduce(confusion)
        loss, top5 = (sums / len(self._pictures)).tolist()
        return Scores(loss, confusion.view(self._classes, self._classes), top5)

    def _tally(
        self, logits: torch.Tensor, classes: torch.Tensor, confusion: torch.Tensor
    ) -> torch.Tensor:
        """Count a batch; its sums of the loss and of hits among the likeliest five."""
        pairs = classes * self._classes + logits.argmax(dim=1)
        confusion += torch.bincount(pairs, minlength=self._classes**2)
        likeliest = logits.topk(min(5, self._classes), dim=1).indices
        hits = (likeliest == classes[:, None]).any(dim=1).sum()
        loss = F.cross_entropy(logits, classes, reduction="sum")
        return torch.stack([loss.double(), hits.double()])
