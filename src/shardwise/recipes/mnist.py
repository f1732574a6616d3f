"""A convolutional net learns digits: what it adds to the training that all recipes share.

A convolutional net for MNIST, in plain torch.

    28 x 28 x 1 -> conv 5 x 5, batch norm, pool -> 12 x 12 x 16
                -> conv 5 x 5, batch norm, pool ->  4 x 4 x 32 -> 64 -> 10

Of the kind that the MNIST examples of PyTorch/XLA train. It is a ``Sequential`` so that a program
which loads what was trained can write it down in a few lines; docs/vision.md does.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn

from shardwise import checkpoint_module
from shardwise.recipes.core.config import AdamWConfig
from shardwise.recipes.core.optim import make_adamw, warmup_cosine
from shardwise.recipes.core.parallelize import shard
from shardwise.recipes.core.task import Place, Task
from shardwise.recipes.vision.config import MnistInputs
from shardwise.recipes.vision.files import CLASSES, SIDE, IdxSet
from shardwise.recipes.vision.images import Batch
from shardwise.recipes.vision.task import load_plain, vision_task

MEAN, STD = 0.1307, 0.3081  # of the training set


class Digits:
    """MNIST in memory, a byte a pixel.

    Args:
        digits: the files' contents.
    """

    def __init__(self, digits: IdxSet) -> None:
        # A copy, since bytes cannot be written to, which a tensor could be.
        images = torch.frombuffer(bytearray(digits.images), dtype=torch.uint8)
        self._images = images.view(-1, 1, SIDE, SIDE)
        self._labels = torch.frombuffer(bytearray(digits.labels), dtype=torch.uint8).long()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._labels)

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Some of them; nothing is done to them at random."""
        del keys
        chosen = torch.tensor(indices)
        return (self._images[chosen].float() / 255 - MEAN) / STD, self._labels[chosen]


def assemble(inputs: MnistInputs, place: Place) -> Task:
    """Build model, optimizer and data on one rank."""
    config, train = inputs.config, inputs.train
    assert isinstance(train.optimizer, AdamWConfig)
    torch.manual_seed(train.seed)  # every rank begins with the same weights
    model = build_convnet().to(place.device)
    blocks = list(model)[:-1]  # and the head belongs to the root
    if train.sharding.activation_checkpointing:
        for block in blocks:
            checkpoint_module(block)
    sharded = shard(model, blocks if config.nested else [], train.sharding, place)
    per_step = train.examples_per_step(place.world.size)
    curve = warmup_cosine(train.optimizer, inputs.span.steps_in_all(per_step))
    return vision_task(
        inputs,
        place,
        model_name="convnet",
        data_name="MNIST",
        model=sharded,
        load=functools.partial(load_plain, build_convnet, place.device),
        loaded_into="a plain module",
        optimizer=make_adamw(model, train.optimizer),
        # By examples, so that it does not matter how many a step has had before.
        schedule=lambda position: curve(position.examples / per_step),
        training=Digits(inputs.training),
        validation=Digits(inputs.test),
        classes=[str(digit) for digit in range(CLASSES)],
    )


WIDTHS = (16, 32)
HIDDEN = 64


def build_convnet() -> nn.Sequential:
    """Build the net. It maps (count, 1, 28, 28) to logits, (count, 10)."""
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


def _block(channels: int, width: int) -> nn.Sequential:
    # Pooled before ReLU, which is the same and a quarter of the work.
    return nn.Sequential(
        nn.Conv2d(channels, width, 5), nn.BatchNorm2d(width), nn.MaxPool2d(2), nn.ReLU()
    )
