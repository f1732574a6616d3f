"""Report which rank holds what, of a running job or of one that has not been started.

A plan needs neither processes nor memory for parameters: one process stands in for the whole mesh.
Tensor parallelism and ``fully_shard`` are applied as training applies them, to a model on the meta
device and with a fake process group. Then the layouts are read as in a running job, so a plan
cannot differ from what the runtime does. Only reading values communicates.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise._torch import c10d, dtensor, fsdp
from shardwise.base.arguments import check_arguments
from shardwise.frontends.fsdp2 import fully_shard
from shardwise.frontends.strategies import TENSOR, WantedMesh
from shardwise.insight.blueprint import Blueprint, apply_tensor_parallelism
from shardwise.insight.inspect.grid import (
    Coordinate,
    Grid,
    Tiling,
    coordinates_in,
    grid_of,
    names_of,
    reachable,
)
from shardwise.insight.inspect.report import MOST_VALUES, ParameterReport, ParamKind, Report, Values
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import unaveraged_dims
from shardwise.sharding.param import ShardedParam
from shardwise.sharding.part import Part, cut, full_part, placed, shape_of, take
from shardwise.sharding.state import state_of

T = TypeVar("T")
#: The part and the number of padding elements that each rank holds.
Held = dict[int, tuple[Part, int]]


@dataclass
class Found:
    """One parameter of a model in its current state.

    Attributes:
        parameter: the registered tensor, sharded or full.
        form: its sharded form; ``None`` if our ``fully_shard`` does not manage it.
        group: the name of the module whose ``fully_shard`` call manages it, or ``None``.
        names: all its names.
    """

    parameter: torch.Tensor
    form: ShardedParam | None
    group: str | None
    names: list[str] = field(default_factory=list)

    @property
    def stored(self) -> torch.Tensor:
        """The tensor that this rank keeps between steps: a ``DTensor`` or a plain tensor."""
        return self.parameter if self.form is None else self.form.parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements."""
        stored = self.stored
        return dtensor.local_of(stored) if isinstance(stored, DTensor) else stored.detach()

    def meshes(self) -> Iterator[DeviceMesh]:
        """The meshes that the parameter is distributed over."""
        if self.form is not None:
            yield self.form.mesh.mesh
            if self.form.origin is not None:
                yield self.form.origin.mesh
        elif isinstance(self.parameter, DTensor):
            yield self.parameter.device_mesh


def read(model: nn.Module, mesh: DeviceMesh | None = None, name: str | None = None) -> Report:
    """Report the layout of every parameter, without values; see :func:`shardwise.inspect`."""
    found = parameters_of(model)
    grid = _grid(found, mesh)
    reader = _Reader(grid)
    return Report(
        model=name or fsdp.original_class(model).__name__,
        grid=grid,
        parameters=tuple(reader.report(each) for each in found),
        unaveraged=unaveraged_dims(mesh for each in found for mesh in each.meshes()),
    )


def parameters_of(model: nn.Module) -> list[Found]:
    """All parameters of ``model`` in its order, tied ones once."""
    forms = _forms(model)
    found: dict[int, Found] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        form, group = forms.get(id(parameter), (None, None))
        key = id(parameter) if form is None else id(form)
        found.setdefault(key, Found(parameter, form, group)).names.append(name)
    return list(found.values())


def _forms(model: nn.Module) -> dict[int, tuple[ShardedParam | None, str]]:
    """The sharded form and the group's name for each tensor that modules hold, by its id.

    Parameters of torch's own FSDP2 have no form of ours: the ``DTensor`` says all.
    """
    forms: dict[int, tuple[ShardedParam | None, str]] = {
        id(held): (None, each.name) for each in fsdp.torch_groups(model) for _, held in each.params
    }
    for name, module in model.named_modules():
        state = state_of(module)
        for group in state.groups if state is not None else ():
            for param in group.params:
                for held in (param.form.parameter, param.full, param.form.summoned):
                    if held is not None:
                        forms.setdefault(id(held), (param.form, name))
    return forms


class _Reader:
    """Reports parameters; those that are sharded alike share one tiling."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._tilings: dict[object, tuple[Tiling, tuple[tuple[int, ...], ...]]] = {}
        self._places = functools.cache(coordinates_in)

    def report(self, found: Found) -> ParameterReport:
        stored = found.stored
        tiling, cut_along = self._tiling(found)
        first, *others = found.names
        placements: tuple[tuple[str, str], ...] = ()
        if isinstance(stored, DTensor):
            described = map(dtensor.describe_placement, stored.placements)
            placements = tuple(zip(names_of(stored.device_mesh), described, strict=True))
        return ParameterReport(
            name=first,
            aliases=tuple(others),
            dtype=str(stored.dtype).removeprefix("torch."),
            itemsize=stored.dtype.itemsize,
            trainable=stored.requires_grad,
            kind=_kind(found),
            group=found.group,
            cut_dim=None if found.form is None else found.form.layout.dim,
            placements=placements,
            tiling=tiling,
            cut_along=cut_along,
        )

    def _tiling(self, found: Found) -> tuple[Tiling, tuple[tuple[int, ...], ...]]:
        key = self._key(found)
        if key not in self._tilings:
            tiling = Tiling.of(tuple(found.stored.shape), self._held(found))
            self._tilings[key] = tiling, _cut_along(tiling, self._grid)
        return self._tilings[key]

    def _key(self, found: Found) -> object:
        form, stored = found.form, found.stored
        spec = dtensor.spec_of(stored) if isinstance(stored, DTensor) else None
        own = None if spec is None else (spec.mesh, spec.placements)
        if form is None:
            return tuple(stored.shape), own
        origin = form.origin and (form.origin.mesh, form.origin.placements)
        return tuple(stored.shape), own, origin, form.layout.dim, form.mesh.mesh

    def _held(self, found: Found) -> Held:
        form = found.form
        if form is None:
            stored = found.stored
            spec = dtensor.spec_of(stored) if isinstance(stored, DTensor) else None
            parts = self._parts(tuple(stored.shape), spec)
            return {rank: (part, 0) for rank, part in parts.items()}
        shape = form.layout.shape if form.origin is None else form.origin.shape
        places = self._places(form.mesh.mesh)
        return {
            rank: _cut_by(form.layout, part, places[rank][-1])
            for rank, part in self._parts(tuple(shape), form.origin).items()
            if rank in places
        }

    def _parts(self, shape: tuple[int, ...], spec: dtensor.DTensorSpec | None) -> dict[int, Part]:
        """The part of a tensor that each rank has before ``fully_shard`` shards it."""
        if spec is None:
            return dict.fromkeys(self._grid.ranks, full_part(shape))
        places = self._places(spec.mesh)
        return {
            rank: placed(shape, spec.placements, spec.mesh.shape, places[rank])
            for rank in self._grid.ranks
            if rank in places
        }


def _cut_by(own: Layout, part: Part, index: int) -> tuple[Part, int]:
    """The part and the padding that rank ``index`` keeps of ``part``.

    ``own`` is the layout on this rank. Ranks that tensor parallelism gave another part shard it in
    the same way.
    """
    if own.dim is None:
        return part, 0
    layout = Layout(torch.Size(shape_of(part)), own.dim, own.world_size)
    padding = layout.chunk_numel - layout.shard_shape(index).numel()
    return cut(part, own.dim, own.world_size, index), padding


def _grid(found: list[Found], mesh: DeviceMesh | None) -> Grid:
    if mesh is not None:
        return grid_of([mesh], set(mesh.mesh.flatten().tolist()))
    if not dist.is_initialized():
        return Grid(("rank",), (1,), (0,))
    meshes = list(dict.fromkeys(mesh for each in found for mesh in each.meshes()))
    if not meshes:  # every rank is assumed to have the full model
        return Grid(("rank",), (dist.get_world_size(),), tuple(range(dist.get_world_size())))
    return grid_of(meshes, reachable(meshes, dist.get_rank()))


def _cut_along(tiling: Tiling, grid: Grid) -> tuple[tuple[int, ...], ...]:
    """For each grid dimension, the tensor dimensions along which ranks hold different indices."""
    changed: list[set[int]] = [set() for _ in grid.names]
    first: dict[tuple[int, Coordinate], Part] = {}
    for rank, place in grid.coordinates.items():
        block = tiling.by_rank.get(rank)
        if block is None:
            continue
        for dim in range(len(place)):
            other = first.setdefault((dim, (*place[:dim], *place[dim + 1 :])), block.part)
            changed[dim] |= {d for d, span in enumerate(block.part) if span != other[d]}
    return tuple(tuple(sorted(dims)) for dims in changed)


def _kind(found: Found) -> ParamKind:
    if found.form is not None:
        return ParamKind.REPLICATED if found.form.layout.dim is None else ParamKind.SHARDED
    if found.group is not None:
        return ParamKind.SHARDED  # by torch's FSDP2
    return ParamKind.TENSOR_PARALLEL if isinstance(found.parameter, DTensor) else ParamKind.PLAIN


def gather_values(model: nn.Module) -> Values | None:
    """Gather the elements of small parameters to the first rank: a collective over the world.

    Returns:
        On the first rank, the elements by name and rank; on the others ``None``.

    Raises:
        ValueError: the model is on the meta device.
    """
    own: dict[str, Any] = {}
    for each in parameters_of(model):
        if each.stored.numel() > MOST_VALUES:
            continue
        if each.local.is_meta:
            raise ValueError(
                f"values: found {each.names[0]} on the meta device, expected a model with values; "
                "materialize it first"
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


@dataclass(frozen=True, kw_only=True)
class ModelReport(Report):
    """A report that can show itself: ``print`` it, or write it as a page or a picture."""

    def __str__(self) -> str:
        from shardwise.insight.inspect.text import as_text  # imports rich

        return as_text(self)

    def _repr_html_(self) -> str:
        """Return the page in a frame as high as it is: notebooks show it."""
        from shardwise.insight.inspect.page import page

        # What scrolls on its own on a page would be cut in a frame.
        whole = page(self).replace(
            "</style>", ".mesh,.scroll,nav,nav>ul{max-height:none!important}</style>", 1
        )
        fit = "this.style.height=this.contentDocument.documentElement.scrollHeight+24+'px'"
        style = "width: 100%; height: 40em; border: 0"
        return f'<iframe style="{style}" onload="{fit}" srcdoc="{html.escape(whole)}"></iframe>'

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Give notebooks and IPython the text that ``print`` shows, where they show no pages."""
        printer.text(str(self))

    def to_html(self, path: str | Path) -> Path:
        """Write the report as one HTML page that loads nothing else.

        Args:
            path: the file to write.

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
        from shardwise.insight.inspect.page import drawing

        path = Path(path)
        path.write_text(drawing(self, self.find(parameter), rank), encoding="utf-8")
        return path


class ModelOfRanks(Protocol):
    """The model of each rank of a simulated world."""

    def on_every_rank(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function on every rank, with what it has."""


def inspect(
    model: nn.Module | ModelOfRanks,
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
        model: the model, in any state; or what :func:`shardwise.simulate` returned for a function
            that returns it. Then ``values`` are shown in any case.
        mesh: the mesh to show, in place of the largest one that parameters lie on.
        values: gather the elements of small parameters (at most 256 each) to the first rank of the
            world. This is one collective over the default process group, so every rank has to make
            the call.
        name: the name of the model in the report; the name of its class by default.

    Returns:
        The report; ``str()`` of it is a table.

    Raises:
        ValueError: ``values`` is set and the model is on the meta device.
        TypeError: a simulated rank has returned something other than a model.
    """
    check_arguments(inspect, locals())
    if not isinstance(model, nn.Module):
        return model.on_every_rank(lambda own: _inspect_own(own, mesh, name))[0]
    report = read(model, mesh, name)
    found = gather_values(model) if values else None
    return ModelReport(**{**vars(report), "values": found})


def _inspect_own(own: object, mesh: DeviceMesh | None, name: str | None) -> ModelReport:
    if not isinstance(own, nn.Module):
        raise TypeError(
            f"model: found a value of type {type(own).__name__}, expected each rank to return a "
            "model"
        )
    return inspect(own, mesh=mesh, values=True, name=name)


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
