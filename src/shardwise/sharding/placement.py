"""The placement of a sharded parameter: the mesh and the placements of its ``DTensor``."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """Where the shards of a parameter will be.

    Attributes:
        mesh: the ranks that it is sharded over.
        layout: how this rank's part of the original is cut.
        spec: mesh, placements and global shape of the sharded parameter.
    """

    mesh: DataMesh
    layout: Layout
    spec: dtensor.DTensorSpec

    @classmethod
    def of(cls, param: torch.Tensor, fqn: str, mesh: DataMesh, wanted: Shard | None) -> Place:
        """Choose the place of ``param``, without changing it.

        See :func:`dim_to_shard` and :func:`sharded_spec`.
        """
        shape = dtensor.plain(param).shape
        layout = Layout(shape, dim_to_shard(param, mesh, wanted), mesh.shard.world_size)
        return cls(mesh, layout, sharded_spec(param, fqn, mesh, layout))


def dim_to_shard(param: torch.Tensor, mesh: DataMesh, wanted: Shard | None) -> int | None:
    """Choose the dimension of ``param`` to cut over ``mesh``.

    By default that is the first dimension that :func:`can_shard` allows: dimension 0, except for
    uneven parts that tensor parallelism left, which no placement could describe.

    Args:
        param: a plain tensor, or a ``DTensor`` that tensor parallelism left.
        mesh: the ranks to shard over.
        wanted: the user's choice, if there is one.

    Returns:
        The dimension, or ``None`` if every rank keeps the full tensor.
    """
    if param.ndim == 0 or not mesh.shards:
        return None
    if wanted is not None:
        return wanted.dim % param.ndim
    return next((dim for dim in range(param.ndim) if can_shard(param, mesh, dim)), None)


def can_shard(param: torch.Tensor, mesh: DataMesh, dim: int) -> bool:
    """Whether placements can say which rank holds which rows of ``param``, cut along ``dim``."""
    if not isinstance(param, DTensor):
        return True
    origin = dtensor.spec_of(param)
    first = 0
    if mesh.outer is not None and mesh.dims is not None:
        names = mesh.outer.mesh_dim_names or ()
        first = max((names.index(name) + 1 for name in mesh.dims.shard_names), default=0)
    sizes = _cuts_before(dim, origin.placements, origin.mesh, first)
    pieces, rows = math.prod(sizes), param.shape[dim]
    if rows % pieces == 0:
        return True
    return len(sizes) == 1 and is_describable(rows, pieces, mesh.shard.world_size)


def is_describable(rows: int, pieces: int, ranks: int) -> bool:
    """Whether placements can describe ``rows`` cut into ``pieces``, each sharded over ``ranks``.

    Placements say which rows a data parallel rank holds together with its tensor parallel peers,
    and imply that these peers cut them as ``torch.chunk`` does. Example: tensor parallelism over
    two ranks cuts nine rows into 5 and 4. Four data parallel ranks then hold 2 2 1 0 of the first
    piece and 1 1 1 1 of the second. So the last data parallel rank has 0 and 1 rows, but
    ``torch.chunk`` would cut its one row into 1 and 0.
    """
    by_piece = [_lengths(left, ranks) for left in _lengths(rows, pieces)]
    by_rank = (list(held) for held in zip(*by_piece, strict=True))
    return all(held == _lengths(sum(held), pieces) for held in by_rank)


def _lengths(rows: int, ranks: int) -> list[int]:
    layout = Layout(torch.Size((rows,)), 0, ranks)
    return [layout.rows(rank)[1] for rank in range(ranks)]


def sharded_spec(
    param: torch.Tensor, fqn: str, mesh: DataMesh, layout: Layout
) -> dtensor.DTensorSpec:
    """The mesh, placements and global shape of ``param`` sharded over ``mesh``.

    There are three kinds of parameters:

    - A plain tensor is placed on the data parallel mesh.
    - A ``DTensor`` on a tensor parallel mesh beside the data parallel one is placed on both, data
      parallel first. If both cut the same dimension, tensor parallelism cut it first, which
      ``_StridedShard`` expresses.
    - A ``DTensor`` on one mesh that includes the data parallel dimensions (``dp_mesh_dims``): those
      dimensions replicated it before, and shard it now.

    Raises:
        ValueError: ``dp_mesh_dims`` was given, and ``param`` is not on that mesh or is not
            replicated over its data parallel dimensions.
    """
    own = mesh.placements(layout.dim)
    if not isinstance(param, DTensor):
        if mesh.outer is not None:
            raise ValueError(
                f"{fqn} is a plain tensor of shape {tuple(param.shape)} on rank "
                f"{dist.get_rank()}; with dp_mesh_dims every parameter has to be a DTensor on the "
                "full mesh. Use distribute_module first"
            )
        strides = torch.empty(param.shape, device="meta").stride()
        return dtensor.make_spec(mesh.mesh, own, param.shape, strides, param.dtype)
    origin = dtensor.spec_of(param)
    if mesh.outer is None:
        strided = [_after(each, origin.placements, origin.mesh, 0) for each in own]
        joined = dtensor.join_meshes([mesh.mesh, origin.mesh])
        placements: tuple[Placement, ...] = (*strided, *origin.placements)
    else:
        joined, placements = _on_outer_mesh(origin, fqn, mesh, layout)
    return dtensor.make_spec(joined, placements, param.shape, param.stride(), param.dtype)


def _after(
    placement: Placement, others: tuple[Placement, ...], mesh: DeviceMesh, first: int
) -> Placement:
    """``placement``, if mesh dimensions from ``first`` on have already cut the tensor."""
    if not isinstance(placement, Shard):
        return placement
    pieces = math.prod(_cuts_before(placement.dim, others, mesh, first))
    return dtensor.strided_shard(placement.dim, pieces) if pieces > 1 else placement


def _cuts_before(
    dim: int, others: tuple[Placement, ...], mesh: DeviceMesh, first: int
) -> list[int]:
    """The number of pieces into which each mesh dimension from ``first`` on cut ``dim``."""
    return [
        mesh.size(i)
        for i, other in enumerate(others)
        if i >= first and mesh.size(i) > 1 and dtensor.sharded_dim(other) == dim
    ]


def _on_outer_mesh(
    origin: dtensor.DTensorSpec, fqn: str, mesh: DataMesh, layout: Layout
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    outer, dims = mesh.outer, mesh.dims
    assert outer is not None
    assert dims is not None
    names = outer.mesh_dim_names
    assert names is not None
    if origin.mesh != outer:
        raise ValueError(
            f"{fqn} on rank {dist.get_rank()}: with dp_mesh_dims, expected every parameter on the "
            f"mesh that fully_shard was given, {outer}, found {origin.mesh}. Distribute it "
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
        placements[index] = _after(cut, origin.placements, outer, index + 1)
    if len(dims.shard_names) <= 1:
        return outer, tuple(placements)
    # Several sharding dimensions become one, because those of a DTensor cut one after the other.
    joined: list[DeviceMesh] = []
    result: list[Placement] = []
    for name, placement in zip(names, placements, strict=True):
        if name == dims.shard_names[0]:
            joined.append(mesh.mesh)
            result += [Replicate()] * (mesh.mesh.ndim - 1) + [placement]
        elif name not in (*dims.shard_names, *dims.replicate_names):
            joined.append(outer[name])
            result.append(placement)
    return dtensor.join_meshes(joined), tuple(result)


def full_tensor(value: DTensor, placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """Return a ``DTensor``'s values, gathered on every rank, in memory of their own. A collective.

    Args:
        value: on the device of its mesh, on the host if it is offloaded, or on the meta device.
        placements: how the result is placed; ``None``: as the full tensor.
    """
    local, kind = dtensor.local_of(value), value.device_mesh.device_type
    if local.is_meta:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if local.device.type != kind:  # offloaded: collectives run on the compute device
        local = local.to(kind)
        value = dtensor.wrap_local(local, dtensor.spec_of(value))
    wanted = [Replicate()] * value.device_mesh.ndim if placements is None else placements
    from shardwise.transport.buckets import is_sendable

    if is_sendable(value.dtype):
        full = dtensor.wait_tensor(value.redistribute(placements=wanted).to_local())
    else:
        sent = _in_bytes(value).redistribute(placements=wanted)
        full = dtensor.wait_tensor(sent.to_local()).contiguous().view(value.dtype).squeeze(-1)
    shared = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return full.clone() if shared else full


def _in_bytes(value: DTensor) -> DTensor:
    """The bytes of each element, as one more dimension, which no rank cuts."""
    local = dtensor.local_of(value).detach().contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size((*value.shape, value.dtype.itemsize))
    strides = torch.empty(shape, device="meta").stride()
    spec = dtensor.make_spec(value.device_mesh, value.placements, shape, strides, torch.uint8)
    return dtensor.wrap_local(local, spec)
