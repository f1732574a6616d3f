"""A residual net learns pictures: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools

import torch

from shardwise import checkpoint_module
from shardwise.recipes.augment import FolderPictures
from shardwise.recipes.config import SgdConfig
from shardwise.recipes.imagenet_config import FAKE_TRAINING, FAKE_VALIDATION, ImagenetInputs
from shardwise.recipes.model import build_classifier, initialise
from shardwise.recipes.optim import make_sgd
from shardwise.recipes.pictures import FakePictures, Pictures
from shardwise.recipes.sharded import shard
from shardwise.recipes.task import Place, Task
from shardwise.recipes.vision import vision_task
from shardwise.wrap import repeated_blocks


def assemble(inputs: ImagenetInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, SgdConfig)
    plain = functools.partial(build_classifier, inputs.settings, len(inputs.classes))
    with torch.device("meta"):
        model = plain()
    blocks = repeated_blocks(model)
    if train.sharding.activation_checkpointing:
        for block in blocks:
            checkpoint_module(block)
    sharded = shard(model, blocks, train.sharding, place)
    initialise(model, train.seed)
    training, validation = _pictures(inputs)
    per_epoch = len(training)
    return vision_task(
        inputs,
        place,
        model_name=config.model,
        data_name=inputs.facts()["data"]["name"],
        model=sharded,
        plain=plain,
        optimizer=make_sgd(model, train.optimizer),
        schedule=lambda position: config.lr(position.examples / per_epoch),
        training=training,
        validation=validation,
        classes=inputs.classes,
    )


def _pictures(inputs: ImagenetInputs) -> tuple[Pictures, Pictures]:
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
