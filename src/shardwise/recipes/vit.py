"""A Vision Transformer learns pictures: what it adds to the training that all recipes share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from shardwise.checkpoint import load_weights
from shardwise.recipes.classify import Evaluation
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
    task = vision_task(
        inputs,
        place,
        model_name=config.model,
        data_name=inputs.facts()["data"]["name"],
        model=sharded,
        model_config=config_json(model),
        plain=None,  # no rank has room for it
        optimizer=make_adamw(model, train.optimizer),
        # By examples, so that it does not matter how many a step has had before.
        schedule=lambda position: curve(position.examples / per_step),
        training=training,
        validation=validation,
        classes=inputs.classes,
    )
    classes, device = len(inputs.classes), place.device
    evaluation = Evaluation(validation, classes, train.batch_size, place.world, device)
    finish = functools.partial(_judge_file, inputs, place, evaluation, task.finish)
    return replace(task, finish=finish)


def _judge_file(
    inputs: VitInputs,
    place: Place,
    evaluation: Evaluation,
    write_file: Callable[[Path, Mapping[str, float]], Mapping[str, float]],
    checkpoint: Path,
    results: Mapping[str, float],
) -> Mapping[str, float]:
    """Write the model as one file, load that into new shards, and judge what was loaded."""
    results = write_file(checkpoint, results)
    model = build(inputs.settings, len(inputs.classes))
    born(model, inputs.train.sharding, place, None, nested=inputs.config.nested)
    load_weights(inputs.config.files.weights, model)
    scores = evaluation(model)
    place.display.say(
        f"again      accuracy {scores.accuracy:.4f} by the file alone, loaded into new shards; "
        f"{results['accuracy']:.4f} before"
    )
    return {**results, "accuracy_of_file": scores.accuracy}


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
