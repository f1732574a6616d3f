"""``shardwise.inspect``: what the ranks of a running job hold."""

from __future__ import annotations

import dataclasses

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.inspect.read import read
from shardwise.inspect.report import Report


def inspect(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    values: bool = False,
    name: str | None = None,
) -> Report:
    """Report which rank holds which part of every parameter of ``model``.

    Takes any model: under ``fully_shard`` or ``FullyShardedDataParallel``, on meshes of any number
    of dimensions, on top of tensor parallelism, or not sharded at all. Ranks are those that the
    meshes of the model connect; where a model lies on no mesh, all ranks of the world.

    Layouts are read, not measured: without ``values`` nothing is communicated, and one rank may
    call it alone.

    Args:
        model: the model, in whatever state.
        mesh: the mesh to show instead of the largest one that parameters lie on.
        values: gather the elements of small parameters (up to 256 each) to the first rank of the
            world, in one collective over the default process group: all its ranks have to make
            this call.
        name: what to call the model; by default its class.

    Raises:
        ValueError: ``values`` for a model that is on the meta device.
    """
    report = read(model, mesh, name)
    if not values:
        return report
    from shardwise.inspect.read import gather_values

    return dataclasses.replace(report, values=gather_values(model))
