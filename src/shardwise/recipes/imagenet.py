"""A residual net learns pictures: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools

import torch

from shardwise import checkpoint_module
from shardwise.recipes.core.config import SgdConfig
from shardwise.recipes.core.model import build_classifier, config_json, initialise
from shardwise.recipes.core.optim import make_sgd
from shardwise.recipes.core.parallelize import shard
from shardwise.recipes.core.task import Place, Task
from shardwise.recipes.vision.config import ImagenetInputs
from shardwise.recipes.vision.task import load_plain, pictures_of, vision_task
from shardwise.wrap import repeated_blocks


def assemble(inputs: ImagenetInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, SgdConfig)
    build = functools.partial(build_classifier, inputs.settings, len(inputs.classes))
    with torch.device("meta"):
        model = build()
    blocks = repeated_blocks(model)
    if train.sharding.activation_checkpointing:
        for block in blocks:
            checkpoint_module(block)
    sharded = shard(model, blocks, train.sharding, place)
    initialise(model, train.seed)
    training, validation = pictures_of(inputs)
    per_epoch = len(training)
    return vision_task(
        inputs,
        place,
        model_name=config.model,
        data_name=inputs.facts()["data"]["name"],
        model=sharded,
        model_config=config_json(model),
        load=functools.partial(load_plain, build, place.device),
        loaded_into="a plain module",
        optimizer=make_sgd(model, train.optimizer),
        schedule=lambda position: config.lr(position.examples / per_epoch),
        training=training,
        validation=validation,
        classes=inputs.classes,
    )
