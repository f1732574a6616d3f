"""What all trainings on pictures have in common, once model and data stand.

Telling classes of pictures apart: the loss, and how well it is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from shardwise import FSDPModule
from shardwise.checkpoint.tools.consolidate import consolidate
from shardwise.errors import CheckpointError
from shardwise.launch.world import World
from shardwise.recipes.core.begin import Inputs
from shardwise.recipes.core.checkpointing import SaveError
from shardwise.recipes.core.optim import Schedule
from shardwise.recipes.core.parallelize import RunningStatistics, kept_between_forwards
from shardwise.recipes.core.plot import plot_confusion
from shardwise.recipes.core.rank import on_rank_zero
from shardwise.recipes.core.rundir import RunDir
from shardwise.recipes.core.task import Place, Task
from shardwise.recipes.vision.config import FAKE_TRAINING, FAKE_VALIDATION, PictureInputs
from shardwise.recipes.vision.images import (
    Batch,
    FakePictures,
    FolderPictures,
    Pictures,
    TrainingPictures,
)
from shardwise.transport.peers import Peers


def pictures_of(inputs: PictureInputs) -> tuple[Pictures, Pictures]:
    """Pictures to learn from, and to be judged by."""
    config = inputs.config
    if inputs.folders is None:
        classes, size = len(inputs.classes), config.image_size
        return (
            FakePictures(FAKE_TRAINING, classes, size),
            FakePictures(FAKE_VALIDATION, classes, size),
        )
    training, validation = inputs.folders
    size, threads = config.image_size, config.threads
    return (
        FolderPictures(training, size, augment=True, threads=threads),
        FolderPictures(validation, size, augment=False, threads=threads),
    )


def vision_task(
    inputs: Inputs,
    place: Place,
    *,
    model_name: str,
    data_name: str,
    model: FSDPModule,
    model_config: str | None = None,
    load: Callable[[Path], nn.Module],
    loaded_into: str,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    training: Pictures,
    validation: Pictures,
    classes: list[str],
) -> Task:
    """A task of telling classes of pictures apart.

    Args:
        inputs: the configuration.
        place: where this rank trains.
        model_name: what the model is called.
        data_name: what the data are called.
        model: after sharding.
        model_config: see :class:`Task`.
        load: builds the same model from a safetensors file, on this rank's device, for a last
            evaluation of what was saved.
        loaded_into: what that is, ``a plain module``.
        optimizer: over the model's shards.
        schedule: of the learning rate.
        training: pictures to learn from.
        validation: pictures to be judged by.
        classes: their names.
    """
    train, world = inputs.train, place.world
    assert isinstance(model, nn.Module)
    evaluation = Evaluation(validation, len(classes), train.batch_size, world, place.device)
    files = RunDir(train.output.out)
    about = f"{data_name}: {len(training):,} pictures to learn from, {len(validation):,} held back"
    finish = functools.partial(
        _finish,
        place,
        files,
        judge=lambda: evaluation(load(files.weights)),
        loaded_into=loaded_into,
        title=f"{model_name} on {data_name}",
        classes=classes,
    )
    return Task(
        title=f"{model_name} on {data_name}",
        model_name=model_name,
        model=model,
        model_config=model_config,
        optimizer=optimizer,
        schedule=schedule,
        data=TrainingPictures(training, train.seed, train.batch_size * world.size, place.device),
        loss=classification_loss,
        evaluate=lambda: evaluation(model).values(),
        unit="images",
        example="images",
        loss_unit="nats per image",
        introduction=[("data", f"{about}; {len(classes)} classes")],
        after_step=RunningStatistics(model).average,
        finish=finish,
    )


def _finish(
    place: Place,
    files: RunDir,
    checkpoint: Path,
    results: Mapping[str, float],
    *,
    judge: Callable[[], Scores],
    loaded_into: str,
    title: str,
    classes: list[str],
) -> Mapping[str, float]:
    """Write the model as one file, and judge what others get when they load it."""
    say, first = place.display.say, place.world.rank == 0

    def write() -> None:
        try:
            consolidate(checkpoint, files.weights, force=True)
        except (CheckpointError, OSError) as error:
            raise SaveError(f"{files.weights}: {error}; {checkpoint} is whole") from error

    on_rank_zero(f"writing {files.weights}", write)
    say(f"weights    {files.weights}")
    scores = judge()
    if first:
        say(
            f"again      accuracy {scores.accuracy:.4f} by the file alone, loaded into "
            f"{loaded_into}; {results['accuracy']:.4f} before"
        )
        plot_confusion(scores.confusion.tolist(), classes, title, files.confusion)
        say(f"confusion  {files.confusion}")
    return {**results, "accuracy_of_file": scores.accuracy}


def load_plain(build: Callable[[], nn.Module], device: torch.device, file: Path) -> nn.Module:
    """A model from a safetensors file, without sharding: each rank has all of it.

    Args:
        build: builds the model that the file is loaded into.
        device: where it is moved to.
        file: the model.
    """
    model = build()
    model.load_state_dict(load_file(file))
    return model.to(device)


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
        with Peers().collective("the sum of scores"):
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
