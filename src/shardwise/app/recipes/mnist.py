"""``shardwise train mnist``: a convolutional network on handwritten digits.

    28 x 28 x 1 -> conv 5 x 5, batch norm, pool -> 12 x 12 x 16
                -> conv 5 x 5, batch norm, pool ->  4 x 4 x 32 -> 64 -> 10

The network is of the kind that the MNIST examples of PyTorch/XLA train. It is a ``Sequential``, so
that a program that loads the result can define it in a few lines; docs/vision.md does.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.app.recipes.core.build import compile_blocks, shard
from shardwise.app.recipes.core.recipe import Example, Task, TrainContext
from shardwise.app.recipes.vision.config import MnistConfig, VisionInputs
from shardwise.app.recipes.vision.files import CLASSES, SIDE, IdxSet
from shardwise.app.recipes.vision.task import (
    Batch,
    ImageData,
    curve_of,
    example_of,
    load_plain,
    vision_program,
    vision_task,
)
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.schema.training import OptimizerConfig

MEAN, STD = 0.1307, 0.3081  # of the training set
WIDTHS = (16, 32)
HIDDEN = 64


def assemble(inputs: VisionInputs[MnistConfig], place: TrainContext) -> Task:
    """Build model, optimizer and data on one rank."""
    train = inputs.train
    assert isinstance(train.optimizer, OptimizerConfig)
    torch.manual_seed(train.seed)  # every rank begins with the same weights
    model = build_convnet().to(place.device)
    program = vision_program(_blueprint(model, inputs.config), inputs, place)
    shard(program, place)
    if train.sharding.compile:
        compile_blocks(_blocks(model))
    assert inputs.images is not None
    training, validation = inputs.images
    assert isinstance(training, IdxSet)
    assert isinstance(validation, IdxSet)
    data = ImageData("MNIST", Digits(training), Digits(validation), inputs.classes)
    return vision_task(
        inputs,
        place,
        data,
        program=program,
        schedule=curve_of(inputs, place.world),
        load=functools.partial(load_plain, build_convnet, place.device),
        loaded_into="a plain module",
    )


def blueprint(config: MnistConfig) -> Blueprint:
    """Return the network without memory, and how it is sharded."""
    with torch.device("meta"):
        return _blueprint(build_convnet(), config)


def _blueprint(model: nn.Sequential, config: MnistConfig) -> Blueprint:
    blocks = _blocks(model)
    return Blueprint("convnet", model, blocks if config.nested else [], recomputed=blocks)


def example(config: MnistConfig) -> Example:
    """Return batches of images, and their loss."""
    del config
    return example_of(1, SIDE)


class Digits:
    """MNIST in memory, one byte per pixel.

    Args:
        digits: the contents of the files.
    """

    def __init__(self, digits: IdxSet) -> None:
        # A copy, since bytes cannot be written to, which a tensor could be.
        images = torch.frombuffer(bytearray(digits.images), dtype=torch.uint8)
        self._images = images.view(-1, 1, SIDE, SIDE)
        self._labels = torch.frombuffer(bytearray(digits.labels), dtype=torch.uint8).long()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._labels)

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Read some of them; nothing about them is random."""
        del keys
        chosen = torch.tensor(indices)
        return Batch((self._images[chosen].float() / 255 - MEAN) / STD, self._labels[chosen])


def build_convnet() -> nn.Sequential:
    """Build the network. It maps images (count, 1, 28, 28) to logits (count, 10)."""
    first, second = WIDTHS
    return nn.Sequential(
        OrderedDict(
            conv1=_block(1, first),
            conv2=_block(first, second),
            head=nn.Sequential(
                nn.Flatten(), nn.Linear(second * 16, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
            ),
        )
    )


def _blocks(model: nn.Sequential) -> list[nn.Module]:
    return list(model)[:-1]  # the head belongs to the root


def _block(channels: int, width: int) -> nn.Sequential:
    # Pooling before ReLU gives the same result for a quarter of the work.
    return nn.Sequential(
        nn.Conv2d(channels, width, 5), nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.ReLU()
    )
