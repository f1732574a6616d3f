"""Small models, and plans of them that take no process but this one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shardwise.frontends.strategies import WantedMesh
from shardwise.inspect.planning import Planned, plan
from shardwise.inspect.report import Report
from tests.sharding.nets import Net


def planned_report(mesh: str, make: Callable[[], nn.Module] = Net) -> Report:
    """What ranks of ``mesh`` would hold of ``make()``, whose ``blocks`` are groups."""
    with torch.device("meta"):
        model = make()
    blocks = list(getattr(model, "blocks", ()))
    styles = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("up"):
            styles[name] = ColwiseParallel()
        elif isinstance(module, nn.Linear) and name.endswith("down"):
            styles[name] = RowwiseParallel()
    wanted = WantedMesh.parse(mesh)
    return plan(Planned(model, blocks, styles, {}), wanted, make.__name__)
