"""A convolutional net for MNIST, in plain torch.

    28 x 28 x 1 -> conv 5 x 5, batch norm, pool -> 12 x 12 x 16
                -> conv 5 x 5, batch norm, pool ->  4 x 4 x 32 -> 64 -> 10

Of the kind that the MNIST examples of PyTorch/XLA train. It is a ``Sequential`` so that a program
which loads what was trained can write it down in a few lines; docs/vision.md does.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from shardwise.recipes.idx import CLASSES

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
