"""The grid of ranks that a report shows, and the coordinates of ranks in device meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch import dtensor

Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """Ranks of a grid that are shown on one line.

    Attributes:
        panel: their coordinates along all dimensions but the last two, ``"dp_replicate 0"``.
        label: their coordinate along the second to last dimension, and their range along the last
            one if that takes several lines.
        ranks: the ranks.
    """

    panel: str
    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Ranks arranged on a grid.

    Attributes:
        names: names of the dimensions, outermost first.
        shape: number of ranks along each dimension.
        ranks: the global ranks in row-major order.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def coordinates(self) -> Mapping[int, Coordinate]:
        """The coordinates of each rank."""
        return dict(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    def ranks_at(self, leading: Sequence[int]) -> tuple[int, ...]:
        """The ranks whose coordinates begin with ``leading``."""
        each = math.prod(self.shape[len(leading) :])
        first = 0
        for index, size in zip(leading, self.shape, strict=False):
            first = first * size + index
        return self.ranks[first * each : (first + 1) * each]

    def lines(self, across: int) -> Iterator[Line]:
        """Lines of at most ``across`` ranks, in row-major order."""
        *outer, last = self.shape
        for place in product(*map(range, outer)):
            ranks = self.ranks_at(place)
            where = zip(self.names, place[:-1], strict=False)
            panel = ", ".join(f"{name} {index}" for name, index in where)
            for start in range(0, last, across):
                run = "" if last <= across else f"{start}-{min(start + across, last) - 1}"
                own = str(place[-1]) if place else ""
                label = ": ".join(part for part in (own, run) if part)
                yield Line(panel, label, ranks[start : start + across])

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.shape, strict=True))


def coordinates_in(mesh: DeviceMesh) -> dict[int, Coordinate]:
    """The coordinates of every rank in ``mesh`` or in one of its sibling meshes.

    ``world["dp"]`` has only the ranks that this rank shards with. The other ranks of ``world`` have
    a sibling mesh of the same shape each.
    """
    siblings = dtensor.sibling_meshes(mesh)
    places = list(product(*map(range, mesh.shape)))
    return {
        rank: place
        for mesh_ranks in siblings.flatten(1).tolist()
        for rank, place in zip(mesh_ranks, places, strict=True)
    }


def reachable(meshes: Iterable[DeviceMesh], rank: int) -> set[int]:
    """The ranks that the meshes of a model connect to ``rank``, directly or through others.

    Ranks that no mesh connects, such as other pipeline stages, may hold another model.
    """
    rows = [set(row) for mesh in meshes for row in dtensor.sibling_meshes(mesh).flatten(1).tolist()]
    found = {rank}
    while True:
        more = found.union(*(row for row in rows if row & found))
        if more == found:
            return found
        found = more


def grid_of(meshes: Sequence[DeviceMesh], ranks: set[int]) -> Grid:
    """Arrange ``ranks`` as on the mesh with the most dimensions that has all of them.

    Dimensions along which all ranks have the same coordinate (the pipeline's) are left out.
    """
    roots = sorted(map(dtensor.root_mesh, meshes), key=lambda mesh: -mesh.ndim)
    for root in roots:
        grid = _part_of(root, ranks)
        if grid is not None:
            return grid
    return Grid(("rank",), (len(ranks),), tuple(sorted(ranks)))


def _part_of(root: DeviceMesh, ranks: set[int]) -> Grid | None:
    tensor = root.mesh
    inside = torch.isin(tensor, torch.tensor(sorted(ranks)))
    kept = list(range(tensor.ndim))
    for dim in kept:
        others = [other for other in kept if other != dim]
        present = inside.any(dim=others) if others else inside
        tensor = tensor.index_select(dim, present.nonzero().flatten())
    if set(tensor.flatten().tolist()) != ranks:
        return None
    names = names_of(root)
    shown = [d for d in kept if tensor.shape[d] > 1 or root.mesh.shape[d] == 1]
    shown = shown or kept[-1:]
    return Grid(
        tuple(names[dim] for dim in shown),
        tuple(tensor.shape[dim] for dim in shown),
        tuple(tensor.flatten().tolist()),
    )


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of a mesh's dimensions; if it has none, their roles for ``fully_shard``."""
    if mesh.mesh_dim_names is not None:
        return tuple(mesh.mesh_dim_names)
    if mesh.ndim <= 2:
        return ("replicate", "shard")[2 - mesh.ndim :]
    return tuple(f"dim {dim}" for dim in range(mesh.ndim))
