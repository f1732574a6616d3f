"""A Vision Transformer from ``transformers``, built block by block: nobody ever holds it whole.

It comes into being in two moves, so that neither a host nor a device needs room for more than a
rank's shards and one layer:

    build       on the meta device: shapes only, no memory
    born        sharded group by group, still without memory: a rank learns which rows will be its
                own; then layer by layer: memory, initial values, cut, and the whole layer is gone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from shardwise import FSDPModule, materialize
from shardwise.recipes.config import ShardingConfig
from shardwise.recipes.model import (
    build_classifier,
    checkpoint_layers,
    decoder_layers,
    initialise,
)
from shardwise.recipes.sharded import shard
from shardwise.recipes.task import Place
from shardwise.sharding.shares import Shares, shares_of


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
