"""Plan the layout of a model on a mesh without starting processes or allocating parameters.

One process stands in for the whole mesh. Tensor parallelism and ``fully_shard`` are applied as
training applies them, to a model on the meta device and with a fake process group; then the layouts
are read as in a running job. So a plan cannot differ from what the runtime does.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwise._torch import c10d, fsdp
from shardwise.frontends.strategies import TENSOR, WantedMesh
from shardwise.inspect.read import read
from shardwise.inspect.report import MOST_VALUES, Report
from shardwise.inspect.tiling import take
from shardwise.sharding.api import fully_shard


@dataclass(frozen=True)
class Planned:
    """A model and how to shard it.

    Attributes:
        model: the model, on the meta device. It is not modified.
        blocks: the modules that become groups of their own; the rest of the model is one group.
        tensor_parallel: torch's parallel styles by module name, for a mesh with a ``tp`` dimension.
        heads: numbers that the size of ``tp`` has to divide, by what they count.
        placement: the ``shard_placement_fn`` of ``fully_shard``; ``None`` for its default.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    tensor_parallel: Mapping[str, ParallelStyle] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    placement: Callable[[nn.Parameter], Shard | None] | None = None


def plan(planned: Planned, wanted: WantedMesh, name: str) -> Report:
    """Shard a model over a mesh that need not exist, and report which rank would hold what.

    Raises:
        RuntimeError: this process has a default process group.
        ValueError: the model cannot be sharded like this.
    """
    copies: dict[int, Any] = {}
    model = copy.deepcopy(planned.model, copies)
    with c10d.fake_world(wanted.size):
        mesh = init_device_mesh("cpu", wanted.shape, mesh_dim_names=wanted.names)
        if TENSOR in wanted.names:
            _apply_tensor_parallelism(model, mesh[TENSOR], planned.tensor_parallel)
        if wanted.data_parallel:
            data = mesh[wanted.data_parallel]
            for module in (*(copies[id(block)] for block in planned.blocks), model):
                fully_shard(
                    module,
                    mesh=data,
                    transport="collectives",
                    shard_placement_fn=planned.placement,
                )
        return read(model, mesh, name)


def _apply_tensor_parallelism(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> None:
    """Apply the styles, and keep tied parameters tied."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    parallelize_module(model, mesh, dict(styles))
    for (first, name), *others in owners.values():
        for module, other in others:
            fsdp.register_parameter(module, other, fsdp.parameter_of(first, name))


def with_counted_values(report: Report) -> Report:
    """The report with values: those of every small parameter count 0, 1, 2, ..."""
    values: dict[str, dict[int, Any]] = {}
    for each in report.parameters:
        if each.tiling.numel <= MOST_VALUES:
            counted = torch.arange(each.tiling.numel).view(each.shape)
            values[each.name] = {
                rank: take(counted, block.part).tolist()
                for rank, block in sorted(each.tiling.by_rank.items())
            }
    return dataclasses.replace(report, values=values)
