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

from shardwise import materialize
from shardwise.app.recipes.core.build import compile_blocks, shard
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
    vision_program,
    vision_task,
)
from shardwise.checkpoint import load_weights
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.planning.models import vit_placement
from shardwise.wrap import repeated_blocks


def assemble(inputs: VisionInputs[ImageFolderConfig], place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train, data = inputs.config, inputs.train, ImageData.of(inputs)
    build = functools.partial(build_classifier, inputs.settings, len(inputs.classes))
    model = build()
    program = vision_program(_blueprint(model, config), inputs, place)
    shard(program, place)
    initialize(model, train.seed)
    if train.sharding.compile:
        compile_blocks(program.blueprint.recomputed or ())
    own: dict[str, Any]
    if isinstance(config, ImagenetConfig):
        lr, per_epoch = config.lr, len(data.training)
        own = {
            "schedule": lambda position: lr(position.examples / per_epoch),
            "load": functools.partial(load_plain, functools.partial(build, "cpu"), place.device),
            "loaded_into": "a plain module",
        }
    else:
        own = {
            "schedule": curve_of(inputs, place.world),
            "load": functools.partial(_load_sharded, inputs, place),
            "loaded_into": "new shards",
        }
    own["config_json"] = config_json(model)
    return vision_task(inputs, place, data, program=program, **own)


def _load_sharded(
    inputs: VisionInputs[ImageFolderConfig], place: TrainContext, file: Path
) -> PreTrainedModel:
    """Load a Vision Transformer from a safetensors file into new shards."""
    model = build_classifier(inputs.settings, len(inputs.classes))
    shard(vision_program(_blueprint(model, inputs.config), inputs, place), place)
    materialize(model, init=lambda module: None)  # memory only: the values come from the file
    load_weights(file, model)
    return model


def blueprint(config: ImageFolderConfig, classes: int = FAKE_CLASSES) -> Blueprint:
    """Return the model without memory, and how it is sharded; by default for ImageNet's classes."""
    return _blueprint(build_classifier(config.settings(), classes), config)


def example(config: ImageFolderConfig) -> Example:
    """Return batches of images, and their loss."""
    return example_of(3, config.image_size)


def _blueprint(model: PreTrainedModel, config: ImageFolderConfig) -> Blueprint:
    if not isinstance(config, VitConfig):
        blocks: Sequence[nn.Module] = repeated_blocks(model)
        return Blueprint(config.model, model, blocks, recomputed=blocks)
    layers = decoder_layers(model)
    units = layers if config.nested else []
    return Blueprint(config.model, model, units, placement=vit_placement, recomputed=layers)
