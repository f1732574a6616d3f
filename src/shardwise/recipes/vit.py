"""A Vision Transformer learns pictures: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel

from shardwise.checkpoint import load_weights
from shardwise.recipes.config import AdamWConfig, resolve_sharding
from shardwise.recipes.dry_run import Outlook, show
from shardwise.recipes.model import config_json
from shardwise.recipes.optim import make_adamw, warmup_cosine
from shardwise.recipes.picture_config import FAKE_CLASSES
from shardwise.recipes.task import Place, Task
from shardwise.recipes.vision import pictures_of, vision_task
from shardwise.recipes.vit_config import VitConfig, VitInputs
from shardwise.recipes.vit_model import born, build, shares


def assemble(inputs: VitInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, AdamWConfig)
    model = build(inputs.settings, len(inputs.classes))
    sharded = born(model, train.sharding, place, train.seed, nested=config.nested)
    training, validation = pictures_of(inputs)
    per_step = train.examples_per_step(place.world.size)
    curve = warmup_cosine(train.optimizer, inputs.span.steps_in_all(per_step))
    return vision_task(
        inputs,
        place,
        model_name=config.model,
        data_name=inputs.facts()["data"]["name"],
        model=sharded,
        model_config=config_json(model),
        load=functools.partial(_load_sharded, inputs, place),
        loaded_into="new shards",
        optimizer=make_adamw(model, train.optimizer),
        # By examples, so that it does not matter how many a step has had before.
        schedule=lambda position: curve(position.examples / per_step),
        training=training,
        validation=validation,
        classes=inputs.classes,
    )


def _load_sharded(inputs: VitInputs, place: Place, file: Path) -> PreTrainedModel:
    """The model from a safetensors file, in new shards: no rank has room for all of it."""
    model = build(inputs.settings, len(inputs.classes))
    born(model, inputs.train.sharding, place, None, nested=inputs.config.nested)
    load_weights(file, model)
    return model


def show_shares(config: VitConfig, world_size: int) -> None:
    """Print what every rank of a world would hold, without making one.

    The classifier is that of ImageNet, of 1000 classes.

    Args:
        config: model and sharding.
        world_size: number of ranks.
    """
    sharding = config.train.sharding
    plan = resolve_sharding(sharding, world_size)
    model = build(config.settings(), FAKE_CLASSES)
    groups = shares(model, plan.shape[-1], nested=config.nested)
    # No figure is cut off to fit a narrow window.
    console = Console(width=max(Console().width, 120))
    show(Outlook(config.model, groups, plan, sharding), console)
