"""Small models, and plans of them that start no processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shardwise.frontends.strategies import WantedMesh
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.inspect.read import plan
from shardwise.insight.inspect.report import Report
from tests.sharding.nets import Block, Net


class Wide(nn.Module):
    """Twelve blocks, the last of another width, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.blocks[11].up = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def planned_report(mesh: str, make: Callable[[], nn.Module] = Net) -> Report:
    """The report of a plan for ``make()`` on ``mesh``; its ``blocks`` are groups."""
    with torch.device("meta"):
        model = make()
    blocks = list(getattr(model, "blocks", ()))
    blueprint = Blueprint(make.__name__, model, blocks, styles_of(model))
    return plan(blueprint, WantedMesh.parse(mesh))


def styles_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """Tensor parallelism for the modules that are called ``up`` and ``down``."""
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("up"):
            styles[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and name.endswith("down"):
            styles[name] = RowwiseParallel()
    return styles
