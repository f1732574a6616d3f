"""A Vision Transformer learns pictures: what it adds to the training that all recipes share.

A Vision Transformer from ``transformers``, built block by block: nobody ever holds it whole.

It comes into being in two moves, so that neither a host nor a device needs room for more than a
rank's shards and one layer:

    build       on the meta device: shapes only, no memory
    born        sharded group by group, still without memory: a rank learns which rows will be its
                own; then layer by layer: memory, initial values, cut, and the whole layer is gone
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from shardwise import FSDPModule, materialize
from shardwise.checkpoint import load_weights
from shardwise.recipes.core.config import AdamWConfig, ShardingConfig, resolve_sharding
from shardwise.recipes.core.dry_run import Outlook, show
from shardwise.recipes.core.model import (
    build_classifier,
    checkpoint_layers,
    config_json,
    decoder_layers,
    initialise,
)
from shardwise.recipes.core.optim import make_adamw, warmup_cosine
from shardwise.recipes.core.parallelize import shard
from shardwise.recipes.core.task import Place, Task
from shardwise.recipes.vision.config import FAKE_CLASSES, VitConfig, VitInputs
from shardwise.recipes.vision.task import pictures_of, vision_task
from shardwise.sharding.shares import Shares, shares_of


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


def build(settings: dict[str, Any], classes: int) -> PreTrainedModel:
    """Build the model on the meta device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        classes: rows of the classifier, whatever the settings say.

    Raises:
        OptionError: ``transformers`` cannot make an image classifier of the settings.
    """
    with torch.device("meta"):
        return build_classifier(settings, classes)


def units_of(model: PreTrainedModel, *, nested: bool) -> list[nn.Module]:
    """The modules to shard before the model itself: every block, or none."""
    return decoder_layers(model) if nested else []


def placement(param: nn.Parameter) -> Shard | None:
    """Along which dimension a parameter is cut: the first, unless that has one row only.

    The class token and the positions have shapes (1, 1, hidden) and (1, positions, hidden). Cut
    along the first dimension, rank 0 would hold all of them, and with N ranks they would be
    gathered into a buffer of N times their size. So they are cut along their longest dimension.
    """
    if param.ndim < 2 or param.shape[0] > 1:
        return None
    return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))


def shares(model: PreTrainedModel, world_size: int, *, nested: bool = True) -> list[Shares]:
    """What every rank will hold of each group, the model's own last."""
    return shares_of(model, units_of(model, nested=nested), world_size, placement)


def born(
    model: PreTrainedModel,
    config: ShardingConfig,
    place: Place,
    seed: int | None,
    *,
    nested: bool = True,
) -> FSDPModule:
    """Shard a model that is on the meta device, and give the shards their initial values.

    Args:
        model: as :func:`build` made it.
        config: dtypes, activation checkpointing, transport.
        place: over which ranks, by which strategy.
        seed: of the initial values, which depend on nothing else; None: no values, only memory.
        nested: every block is a group of its own; else the model is one group.

    Returns:
        ``model``.
    """
    if config.activation_checkpointing:
        checkpoint_layers(model)
    sharded = shard(model, units_of(model, nested=nested), config, place, placement)
    if seed is None:
        materialize(model, init=lambda module: None)
    else:
        initialise(model, seed)
    return sharded
