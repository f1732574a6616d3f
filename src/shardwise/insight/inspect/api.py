"""Report which rank holds what, of a running job or of one that has not been started.

A plan needs neither processes nor memory for parameters: one process stands in for the whole mesh.
Tensor parallelism and ``fully_shard`` are applied as training applies them, to a model on the meta
device and with a fake process group. Then the layouts are read as in a running job, so a plan
cannot differ from what the runtime does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._torch import c10d
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.strategies import TENSOR, WantedMesh
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.inspect.read import gather_values, read
from shardwise.insight.inspect.report import MOST_VALUES, Report
from shardwise.optim.part import take


@dataclass(frozen=True, kw_only=True)
class ModelReport(Report):
    """A report that can show itself: ``print`` it, or write it as a page or a picture."""

    def __str__(self) -> str:
        from shardwise.insight.inspect.text import as_text  # imports rich

        return as_text(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML page that loads nothing else.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
        from shardwise.insight.inspect.page import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def to_svg(self, parameter: str, path: str | Path, *, rank: int | None = None) -> Path:
        """Draw the mesh and one parameter as SVG.

        Args:
            parameter: its name or alias.
            path: the file to write.
            rank: mark this rank and the block that it holds.

        Returns:
            The path.

        Raises:
            KeyError: there is no such parameter.
            OSError: the file cannot be written.
        """
        from shardwise.insight.inspect.picture import drawing

        path = Path(path)
        path.write_text(drawing(self, self.find(parameter), rank), encoding="utf-8")
        return path


def inspect(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    values: bool = False,
    name: str | None = None,
) -> ModelReport:
    """Report which rank holds which part of every parameter of ``model``.

    Accepts any model: under ``fully_shard`` or ``FullyShardedDataParallel``, on meshes of any
    number of dimensions, on top of tensor parallelism, or not sharded at all. The report covers the
    ranks that the model's meshes connect; for a model on no mesh, all ranks of the world.

    The report is computed from the layouts of the parameters. Unless ``values`` is set, nothing is
    communicated, and a single rank may call this.

    Args:
        model: the model, in any state.
        mesh: the mesh to show, in place of the largest one that parameters lie on.
        values: gather the elements of small parameters (at most 256 each) to the first rank of the
            world. This is one collective over the default process group, so every rank has to make
            the call.
        name: the name of the model in the report; the name of its class by default.

    Returns:
        The report; ``str()`` of it is a table.

    Raises:
        ValueError: ``values`` is set and the model is on the meta device.
    """
    report = read(model, mesh, name)
    found = gather_values(model) if values else None
    return ModelReport(**{**vars(report), "values": found})


def plan(blueprint: Blueprint, wanted: WantedMesh) -> Report:
    """Report which rank of a mesh, which need not exist, would hold what of a model.

    Raises:
        RuntimeError: this process has a default process group.
        ValueError: the model cannot be sharded like this.
    """
    model, blocks = blueprint.copied()
    with c10d.fake_world(wanted.size):
        mesh = init_device_mesh("cpu", wanted.shape, mesh_dim_names=wanted.names)
        if TENSOR in wanted.names:
            apply_tensor_parallelism(model, mesh[TENSOR], blueprint.tensor_parallel)
        if wanted.data_parallel:
            data = mesh[wanted.data_parallel]
            for module in (*blocks, model):
                fully_shard(
                    module,
                    mesh=data,
                    transport="collectives",
                    shard_placement_fn=blueprint.placement,
                )
        return read(model, mesh, blueprint.name)


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
    return replace(report, values=values)
