"""``shardwise train vit``: a Vision Transformer of ``transformers`` on images in folders.

Neither a host nor a device ever needs room for more than a rank's shards and one layer:

    blueprint       on the meta device: shapes only, no memory
    shard           group by group, still without memory: a rank learns which rows are its own
    initialize      layer by layer: memory, initial values, shard, and the full layer is freed
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from shardwise import FSDPModule, materialize
from shardwise.app.recipes.core.build import (
    compile_blocks,
    make_optimizer,
    shard,
)
from shardwise.app.recipes.core.model import (
    build_classifier,
    config_json,
    decoder_layers,
    initialize,
)
from shardwise.app.recipes.core.recipe import Example, Task, TrainContext
from shardwise.app.recipes.vision.config import FAKE_CLASSES, ImageFolderInputs, VitConfig
from shardwise.app.recipes.vision.task import ImageData, curve_of, example_of, vision_task
from shardwise.checkpoint import load_weights
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.models import vit_placement
from shardwise.insight.schema.sharding import ShardingConfig
from shardwise.insight.schema.training import OptimizerConfig


def assemble(inputs: ImageFolderInputs[VitConfig], place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, OptimizerConfig)
    model = build_classifier(inputs.settings, len(inputs.classes))
    sharded = shard_model(model, units_of(model, config), train.sharding, place)
    initialize(model, train.seed)
    if train.sharding.compile:
        compile_blocks(decoder_layers(model))
    return vision_task(
        inputs,
        place,
        ImageData.of(inputs),
        name=config.model,
        model=sharded,
        config_json=config_json(model),
        optimizer=make_optimizer(model, train.optimizer),
        schedule=curve_of(inputs, place.world),
        load=functools.partial(_load_sharded, inputs, place),
        loaded_into="new shards",
    )


def _load_sharded(
    inputs: ImageFolderInputs[VitConfig], place: TrainContext, file: Path
) -> PreTrainedModel:
    """Load the model from a safetensors file into new shards: no rank has room for all of it."""
    model = build_classifier(inputs.settings, len(inputs.classes))
    shard_model(model, units_of(model, inputs.config), inputs.train.sharding, place)
    materialize(model, init=lambda module: None)  # memory only: the values come from the file
    load_weights(file, model)
    return model


def blueprint(config: VitConfig) -> Blueprint:
    """Return the model without memory, and how it is sharded; it has ImageNet's 1000 classes."""
    model = build_classifier(config.settings(), FAKE_CLASSES)
    return Blueprint(config.model, model, units_of(model, config), placement=vit_placement)


def example(config: VitConfig) -> Example:
    """Return batches of images, and their loss."""
    return example_of(3, config.image_size)


def units_of(model: PreTrainedModel, config: VitConfig) -> list[nn.Module]:
    """Return the modules that become groups of their own: every block, or none."""
    return decoder_layers(model) if config.nested else []


def shard_model(
    model: PreTrainedModel, units: Sequence[nn.Module], config: ShardingConfig, place: TrainContext
) -> FSDPModule:
    """Shard a model that is on the meta device; it gets no memory yet.

    Args:
        model: as :func:`.build_classifier` made it.
        units: the modules that become groups of their own.
        config: dtypes, activation checkpointing, transport.
        place: over which ranks, by which strategy.

    Returns:
        ``model``.
    """
    return shard(model, units, config, place, vit_placement, decoder_layers(model))
