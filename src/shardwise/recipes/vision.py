"""What all trainings on pictures have in common, once model and data stand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from shardwise import FSDPModule
from shardwise.checkpoint.tools.consolidate import consolidate
from shardwise.errors import CheckpointError
from shardwise.recipes.augment import FolderPictures
from shardwise.recipes.begin import Inputs
from shardwise.recipes.checkpointing import SaveError
from shardwise.recipes.classify import Evaluation, Scores, classification_loss
from shardwise.recipes.optim import Schedule
from shardwise.recipes.picture_config import FAKE_TRAINING, FAKE_VALIDATION, PictureInputs
from shardwise.recipes.pictures import FakePictures, Pictures, TrainingPictures
from shardwise.recipes.plot import plot_confusion
from shardwise.recipes.rank_zero import on_rank_zero
from shardwise.recipes.rundir import RunDir
from shardwise.recipes.running_stats import RunningStatistics
from shardwise.recipes.task import Place, Task


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
