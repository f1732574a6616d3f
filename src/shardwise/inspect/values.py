"""The elements of small parameters, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.inspect.read import parameters_of
from shardwise.inspect.report import Report
from shardwise.inspect.tiling import take

MOST_ELEMENTS = 256  # of a parameter whose values are shown

Values = Mapping[str, Mapping[int, Any]]


def gather_values(model: nn.Module) -> Values | None:
    """What ranks hold of the small parameters of ``model``: a collective over the world.

    Returns:
        On the first rank, elements by name and rank, nested as the shards are; else ``None``.

    Raises:
        ValueError: the model is on the meta device.
    """
    own: dict[str, Any] = {}
    for each in parameters_of(model):
        if each.stored.numel() > MOST_ELEMENTS:
            continue
        if each.local.is_meta:
            raise ValueError(
                f"{each.names[0]} is on the meta device and has no values; materialize the model "
                "first"
            )
        own[each.names[0]] = each.local.cpu().tolist()
    if not dist.is_initialized():
        return {name: {0: elements} for name, elements in own.items()}
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, every)
    if every is None:
        return None
    names = dict.fromkeys(name for each in every for name in each)
    return {
        name: {rank: each[name] for rank, each in enumerate(every) if name in each}
        for name in names
    }


def counted_values(report: Report) -> Values:
    """What ranks would hold if every small parameter counted 0, 1, 2, ... in order of storage."""
    values: dict[str, dict[int, Any]] = {}
    for each in report.parameters:
        if each.tiling.numel <= MOST_ELEMENTS:
            counted = torch.arange(each.tiling.numel).view(each.shape)
            values[each.name] = {
                rank: take(counted, block.part).tolist()
                for rank, block in sorted(each.tiling.by_rank.items())
            }
    return values
