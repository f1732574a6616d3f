"""``shardwise.inspect``: which rank of a running job holds what, and the ways to show it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.inspect.page import page
from shardwise.inspect.picture import drawing
from shardwise.inspect.read import gather_values, read
from shardwise.inspect.report import Report
from shardwise.inspect.text import as_text


@dataclass(frozen=True, kw_only=True)
class ModelReport(Report):
    """A report that can show itself: ``print`` it, or write it as a page or a picture."""

    def __str__(self) -> str:
        return as_text(self)

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML page that loads nothing else.

        Returns:
            The path.

        Raises:
            OSError: the file cannot be written.
        """
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

    Raises:
        ValueError: ``values`` is set and the model is on the meta device.
    """
    report = read(model, mesh, name)
    return ModelReport(
        model=report.model,
        grid=report.grid,
        parameters=report.parameters,
        values=gather_values(model) if values else None,
    )
