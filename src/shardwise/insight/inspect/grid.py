"""The grid of ranks that a report shows, and how the parts that they hold tile a tensor.

A *part* is what one rank holds (see :mod:`shardwise.sharding.part`). A *block* is a part together
with all ranks that hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch import dtensor
from shardwise.sharding.part import Part, shape_of

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

    def lines(self, across: int) -> Iterator[Line]:
        """Lines of at most ``across`` ranks, in row-major order."""
        *outer, last = self.shape
        for row, place in enumerate(product(*map(range, outer))):
            ranks = self.ranks[row * last : (row + 1) * last]
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


# -- what they hold --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A part of a tensor and the ranks that hold it.

    Attributes:
        part: for each dimension, the spans ``(first, length)`` in elements; no span along a
            dimension that left nothing for these ranks.
        ranks: the ranks that hold it, ascending.
        padding: number of padding elements in the chunk that each of these ranks contributes to an
            all-gather.
    """

    part: Part
    ranks: tuple[int, ...]
    padding: int = 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return shape_of(self.part)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the part; 0 if it is empty."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Tiling:
    """All blocks of a tensor.

    Attributes:
        shape: shape of the full tensor.
        blocks: the blocks by position in the tensor, empty ones last. Each rank that has the tensor
            is in one of them.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, shape: Sequence[int], held: Mapping[int, tuple[Part, int]]) -> Tiling:
        """Build the tiling from the part and the number of padding elements of each rank."""
        ranks: dict[tuple[Part, int], list[int]] = {}
        for rank, what in sorted(held.items()):
            ranks.setdefault(what, []).append(rank)
        blocks = [Block(part, tuple(own), padding) for (part, padding), own in ranks.items()]
        return cls(tuple(shape), tuple(sorted(blocks, key=lambda b: (not b.numel, b.part))))

    @cached_property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @cached_property
    def by_rank(self) -> Mapping[int, Block]:
        """The block of each rank."""
        return {rank: block for block in self.blocks for rank in block.ranks}

    @property
    def empty_ranks(self) -> tuple[int, ...]:
        """The ranks that have a shard of the tensor without elements."""
        found = (block.ranks for block in self.blocks if not block.numel)
        return tuple(sorted(rank for ranks in found for rank in ranks)) if self.numel else ()

    @property
    def padding(self) -> int:
        """Number of padding elements on all ranks together."""
        return sum(block.padding * len(block.ranks) for block in self.blocks)
