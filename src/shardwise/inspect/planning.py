"""Layouts of a plan that has not run: the runtime itself shards a model without memory.

One process stands for the whole mesh. Tensor parallelism and ``fully_shard`` are applied as a
training would apply them, on the meta device and in a world that is only pretended; then the
layouts are read as they are read off a running job. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardwise._torch import c10d, fsdp
from shardwise.frontends.strategies import TENSOR, WantedMesh
from shardwise.inspect.read import read
from shardwise.inspect.report import Report
from shardwise.sharding.api import fully_shard


@dataclass(frozen=True)
class Planned:
    """A model to be sharded, and how.

    Attributes:
        model: on the meta device; it is changed by the plan.
        blocks: the modules that become groups of their own; the rest is one group.
        tensor_parallel: torch's styles by the names of modules, for a mesh with ``tp``.
        heads: numbers that the size of ``tp`` has to divide, by what they count.
        placement: along which dimension a parameter is cut; ``None``: as ``fully_shard`` does.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    tensor_parallel: Mapping[str, ParallelStyle] = field(default_factory=dict)
    heads: Mapping[str, int] = field(default_factory=dict)
    placement: Callable[[nn.Parameter], Shard | None] | None = None


def plan(planned: Planned, wanted: WantedMesh, name: str) -> Report:
    """Shard a model over a mesh that is not there, and report who would hold what.

    Raises:
        RuntimeError: this process is part of a world.
        ValueError: the model cannot be sharded so.
    """
    model = planned.model
    with c10d.fake_world(wanted.size):
        mesh = init_device_mesh("cpu", wanted.shape, mesh_dim_names=wanted.names)
        if TENSOR in wanted.names:
            _apply_tensor_parallelism(model, mesh[TENSOR], planned.tensor_parallel)
        if wanted.data_parallel:
            data = mesh[wanted.data_parallel]
            for module in (*planned.blocks, model):
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
    """Apply the styles; parameters that were tied stay so."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    parallelize_module(model, mesh, dict(styles))
    for (first, name), *others in owners.values():
        for module, other in others:
            fsdp.register_parameter(module, other, fsdp.parameter_of(first, name))
