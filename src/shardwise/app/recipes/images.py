"""``shardwise train imagenet`` and ``vit``: models of ``transformers`` on images in folders.

Neither a host nor a device ever needs room for more than a rank's shards and one layer:

    blueprint       on the meta device: shapes only, no memory
    shard           group by group, still without memory: a rank learns which rows are its own
    initialize      layer by layer: memory, initial values, shard, and the full layer is freed

At the end, a residual network is loaded into a plain module, and a Vision Transformer, for which no
rank may have room, into new shards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise import FSDPModule, materialize
from shardwise.app.recipes.core.build import compile_blocks, make_optimizer, make_sgd, shard
from shardwise.app.recipes.core.model import (
    build_classifier,
    config_json,
    decoder_layers,
    initialize,
)
from shardwise.app.recipes.core.recipe import Example, Task, TrainContext
from shardwise.app.recipes.vision.config import (
    FAKE_CLASSES,
    ImageFolderConfig,
    ImagenetConfig,
    VisionInputs,
    VitConfig,
)
from shardwise.app.recipes.vision.task import (
    ImageData,
    curve_of,
    example_of,
    load_plain,
    vision_task,
)
from shardwise.checkpoint import load_weights
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.models import vit_placement
from shardwise.insight.schema.training import OptimizerConfig, SgdConfig
from shardwise.wrap import repeated_blocks


def assemble(inputs: VisionInputs[ImageFolderConfig], place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train, data = inputs.config, inputs.train, ImageData.of(inputs)
    build = functools.partial(build_classifier, inputs.settings, len(inputs.classes))
    model = build()
    sharded = _shard(model, inputs, place)
    initialize(model, train.seed)
    if train.sharding.compile:
        compile_blocks(units_of(model, config)[1])
    own: dict[str, Any]
    if isinstance(config, ImagenetConfig):
        assert isinstance(train.optimizer, SgdConfig)
        lr, per_epoch = config.lr, len(data.training)
        own = {
            "optimizer": make_sgd(model, train.optimizer),
            "schedule": lambda position: lr(position.examples / per_epoch),
            "load": functools.partial(load_plain, functools.partial(build, "cpu"), place.device),
            "loaded_into": "a plain module",
        }
    else:
        assert isinstance(train.optimizer, OptimizerConfig)
        own = {
            "optimizer": make_optimizer(model, train.optimizer),
            "schedule": curve_of(inputs, place.world),
            "load": functools.partial(_load_sharded, inputs, place),
            "loaded_into": "new shards",
        }
    return vision_task(inputs, place, data, model=sharded, config_json=config_json(model), **own)


def _load_sharded(
    inputs: VisionInputs[ImageFolderConfig], place: TrainContext, file: Path
) -> PreTrainedModel:
    """Load a Vision Transformer from a safetensors file into new shards."""
    model = build_classifier(inputs.settings, len(inputs.classes))
    _shard(model, inputs, place)
    materialize(model, init=lambda module: None)  # memory only: the values come from the file
    load_weights(file, model)
    return model


def blueprint(config: ImageFolderConfig, classes: int = FAKE_CLASSES) -> Blueprint:
    """Return the model without memory, and how it is sharded; by default for ImageNet's classes."""
    model = build_classifier(config.settings(), classes)
    placement = vit_placement if isinstance(config, VitConfig) else None
    return Blueprint(config.model, model, units_of(model, config)[0], placement=placement)


def example(config: ImageFolderConfig) -> Example:
    """Return batches of images, and their loss."""
    return example_of(3, config.image_size)


def units_of(
    model: PreTrainedModel, config: ImageFolderConfig
) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
    """Return the modules that become groups of their own, and the blocks of the model."""
    if not isinstance(config, VitConfig):
        return (blocks := repeated_blocks(model)), blocks
    layers = decoder_layers(model)
    return layers if config.nested else [], layers


def _shard(
    model: PreTrainedModel, inputs: VisionInputs[ImageFolderConfig], place: TrainContext
) -> FSDPModule:
    """Shard a model that is on the meta device; it gets no memory yet."""
    units, blocks = units_of(model, inputs.config)
    placement = vit_placement if isinstance(inputs.config, VitConfig) else None
    return shard(model, units, inputs.train.sharding, place, placement, blocks)
