"""``shardwise train imagenet``: a residual network of ``transformers`` on images in folders."""

from __future__ import annotations

import functools

from shardwise.app.recipes.core.build import compile_blocks, make_sgd, shard
from shardwise.app.recipes.core.model import build_classifier, config_json, initialize
from shardwise.app.recipes.core.recipe import Example, Task, TrainContext
from shardwise.app.recipes.vision.config import FAKE_CLASSES, ImageFolderInputs, ImagenetConfig
from shardwise.app.recipes.vision.task import (
    ImageData,
    example_of,
    load_plain,
    vision_task,
)
from shardwise.frontends.wrap import repeated_blocks
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.schema.training import SgdConfig


def assemble(inputs: ImageFolderInputs[ImagenetConfig], place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, SgdConfig)
    classes = len(inputs.classes)
    model = build_classifier(inputs.settings, classes)
    blocks = repeated_blocks(model)
    sharded = shard(model, blocks, train.sharding, place)
    initialize(model, train.seed)
    if train.sharding.compile:
        compile_blocks(blocks)
    data = ImageData.of(inputs)
    per_epoch = len(data.training)
    build = functools.partial(build_classifier, inputs.settings, classes, device="cpu")
    return vision_task(
        inputs,
        place,
        data,
        name=config.model,
        model=sharded,
        config_json=config_json(model),
        optimizer=make_sgd(model, train.optimizer),
        schedule=lambda position: config.lr(position.examples / per_epoch),
        load=functools.partial(load_plain, build, place.device),
        loaded_into="a plain module",
    )


def blueprint(config: ImagenetConfig) -> Blueprint:
    """Return the network without memory, and how it is sharded; it has ImageNet's 1000 classes."""
    model = build_classifier(config.settings(), FAKE_CLASSES)
    return Blueprint(config.model, model, repeated_blocks(model))


def example(config: ImagenetConfig) -> Example:
    """Return batches of images, and their loss."""
    return example_of(3, config.image_size)
