"""Where a sharded parameter lies: the mesh and the placements of its ``DTensor``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh


@dataclass(frozen=True)
class Place:
    """Where a parameter is to lie.

    Attributes:
        mesh: over which it is sharded.
        layout: how what this rank has of the original is cut.
        spec: mesh, placements and global shape of its sharded form.
    """

    mesh: DataMesh
    layout: Layout
    spec: dtensor.DTensorSpec

    @classmethod
    def of(cls, param: torch.Tensor, fqn: str, mesh: DataMesh, wanted: Shard | None) -> Place:
        """Decide it, as :func:`dim_to_shard` and :func:`sharded_spec` do; changes nothing."""
        shape = dtensor.plain(param).shape
        layout = Layout(shape, dim_to_shard(param, mesh, wanted), mesh.shard.world_size)
        return cls(mesh, layout, sharded_spec(param, fqn, mesh, layout))


def dim_to_shard(param: torch.Tensor, mesh: DataMesh, wanted: Shard | None) -> int | None:
    """Along which dimension to cut ``param`` over ``mesh``; ``None``: every rank holds it whole.

    By default the first one that :func:`can_shard` allows. That is dimension 0, but for uneven
    parts that tensor parallelism left, which torch could not find again by the placements.

    Args:
        param: a plain tensor, or a ``DTensor`` that tensor parallelism left.
        mesh: over which to shard it.
        wanted: what the user asked for, if anything.
    """
    if param.ndim == 0 or not mesh.shards:
        return None
    if wanted is not None:
        return wanted.dim % param.ndim
    return next((dim for dim in range(param.ndim) if can_shard(param, mesh, dim)), None)


def can_shard(param: torch.Tensor, mesh: DataMesh, dim: int) -> bool:
    """Whether placements can say who holds which rows, once ``param`` is cut along ``dim``."""
    if not isinstance(param, DTensor):
        return True
    origin = dtensor.spec_of(param)
    first = 0
    if mesh.whole is not None and mesh.dims is not None:
        names = mesh.whole.mesh_dim_names or ()
        first = max((names.index(name) + 1 for name in mesh.dims.shard_names), default=0)
    sizes = _cuts_before(dim, origin.placements, origin.mesh, first)
    pieces, rows = math.prod(sizes), param.shape[dim]
    if rows % pieces == 0:
        return True
    return len(sizes) == 1 and can_be_told(rows, pieces, mesh.shard.world_size)


def can_be_told(rows: int, pieces: int, ranks: int) -> bool:
    """Whether placements can say who holds which of ``rows``, in ``pieces`` that ``ranks`` shard.

    They say of each of the ranks that shard which rows it holds together with its tensor parallel
    peers, and that those peers cut these rows as ``torch.chunk`` does. Nine rows over two ranks of
    tensor parallelism are 5 and 4, of which four that shard hold 2 2 1 0 and 1 1 1 1: the last have
    no row and one row, where ``torch.chunk`` makes one and none.
    """
    by_piece = [_lengths(left, ranks) for left in _lengths(rows, pieces)]
    by_rank = (list(held) for held in zip(*by_piece, strict=True))
    return all(held == _lengths(sum(held), pieces) for held in by_rank)


def _lengths(rows: int, ranks: int) -> list[int]:
    """The number of rows of every rank."""
    layout = Layout(torch.Size((rows,)), 0, ranks)
    return [layout.rows(rank)[1] for rank in range(ranks)]


def sharded_spec(
    param: torch.Tensor, fqn: str, mesh: DataMesh, layout: Layout
) -> dtensor.DTensorSpec:
    """Mesh, placements and global shape of ``param`` once it is sharded over ``mesh``.

    Three kinds of parameters come here:

    - a plain tensor: it lies on the data parallel mesh;
    - a ``DTensor`` on a tensor parallel mesh beside the data parallel one: it lies on both, data
      parallel first, and is cut along the same dimension by tensor parallelism first
      (``_StridedShard`` says so);
    - a ``DTensor`` on one mesh of which some dimensions are data parallel (``dp_mesh_dims``):
      those dimensions, which replicated it, shard it now.

    Raises:
        ValueError: ``dp_mesh_dims`` was given and ``param`` does not lie on that mesh, or its data
            parallel dimensions do not replicate it.
    """
    own = mesh.placements(layout.dim)
    if not isinstance(param, DTensor):
        if mesh.whole is not None:
            raise ValueError(
                f"{fqn} is a plain tensor of shape {tuple(param.shape)} on rank "
                f"{dist.get_rank()}; with dp_mesh_dims every parameter has to be a DTensor on the "
                "whole mesh. Use distribute_module first"
            )
        strides = torch.empty(param.shape, device="meta").stride()
        return dtensor.make_spec(mesh.mesh, own, param.shape, strides, param.dtype)
    origin = dtensor.spec_of(param)
    if mesh.whole is None:
        strided = [_after(each, origin.placements, origin.mesh, 0) for each in own]
        joined = dtensor.join_meshes([mesh.mesh, origin.mesh])
        placements: tuple[Placement, ...] = (*strided, *origin.placements)
    else:
        joined, placements = _on_whole_mesh(origin, fqn, mesh, layout)
    return dtensor.make_spec(joined, placements, param.shape, param.stride(), param.dtype)


def _after(
    placement: Placement, others: tuple[Placement, ...], mesh: DeviceMesh, first: int
) -> Placement:
    """``placement`` where mesh dimensions from ``first`` on have cut the tensor before."""
    if not isinstance(placement, Shard):
        return placement
    pieces = math.prod(_cuts_before(placement.dim, others, mesh, first))
    return dtensor.strided_shard(placement.dim, pieces) if pieces > 1 else placement


def _cuts_before(
    dim: int, others: tuple[Placement, ...], mesh: DeviceMesh, first: int
) -> list[int]:
    """Into how many pieces each mesh dimension from ``first`` on has cut a tensor along ``dim``."""
    return [
        mesh.size(i)
        for i, other in enumerate(others)
        if i >= first and mesh.size(i) > 1 and dtensor.is_sharded_on(other, dim)
    ]


def _on_whole_mesh(
    origin: dtensor.DTensorSpec, fqn: str, mesh: DataMesh, layout: Layout
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    whole, dims = mesh.whole, mesh.dims
    assert whole is not None
    assert dims is not None
    names = whole.mesh_dim_names
    assert names is not None
    if origin.mesh != whole:
        raise ValueError(
            f"{fqn} on rank {dist.get_rank()}: with dp_mesh_dims parameters have to lie on the "
            f"mesh that fully_shard was given, {whole}, found it on {origin.mesh}. Distribute it "
            "over that mesh first"
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        found = origin.placements[names.index(name)]
        if not isinstance(found, Replicate):
            raise ValueError(
                f"{fqn} on rank {dist.get_rank()}: expected Replicate() on the data parallel "
                f"dimension {name!r}, found {found}. Redistribute it first, or leave {name!r} out "
                "of dp_mesh_dims"
            )
    placements = list(origin.placements)
    cut: Placement = Replicate() if layout.dim is None else Shard(layout.dim)
    for name in dims.shard_names:
        index = names.index(name)
        placements[index] = _after(cut, origin.placements, whole, index + 1)
    if len(dims.shard_names) <= 1:
        return whole, tuple(placements)
    # Several dimensions that shard are one: a DTensor's dimensions would cut one after the other.
    joined: list[DeviceMesh] = []
    result: list[Placement] = []
    for name, placement in zip(names, placements, strict=True):
        if name == dims.shard_names[0]:
            joined.append(mesh.mesh)
            result += [Replicate()] * (mesh.mesh.ndim - 1) + [placement]
        elif name not in (*dims.shard_names, *dims.replicate_names):
            joined.append(whole[name])
            result.append(placement)
    return dtensor.join_meshes(joined), tuple(result)
