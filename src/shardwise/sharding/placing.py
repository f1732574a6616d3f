"""Where a sharded parameter lies: the mesh and the placements of its ``DTensor``."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise import _torch
from shardwise.sharding.layout import Layout
from shardwise.sharding.mesh import DataMesh


def sharded_spec(param: torch.Tensor, mesh: DataMesh, layout: Layout) -> _torch.DTensorSpec:
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
                "with dp_mesh_dims every parameter has to be a DTensor on the whole mesh, found a "
                f"plain tensor of shape {tuple(param.shape)}; use distribute_module first"
            )
        strides = torch.empty(param.shape, device="meta").stride()
        return _torch.make_spec(mesh.mesh, own, param.shape, strides, param.dtype)
    origin = _torch.spec_of(param)
    if mesh.whole is None:
        strided = [_after(each, origin.placements, origin.mesh, 0) for each in own]
        joined = _torch.join_meshes([mesh.mesh, origin.mesh])
        placements: tuple[Placement, ...] = (*strided, *origin.placements)
    else:
        joined, placements = _on_whole_mesh(origin, mesh, layout)
    return _torch.make_spec(joined, placements, param.shape, param.stride(), param.dtype)


def _after(
    placement: Placement, others: tuple[Placement, ...], mesh: DeviceMesh, first: int
) -> Placement:
    """``placement`` where mesh dimensions from ``first`` on have cut the tensor before."""
    if not isinstance(placement, Shard):
        return placement
    pieces = math.prod(
        mesh.size(i)
        for i, other in enumerate(others)
        if i >= first and _torch.cuts(other, placement.dim)
    )
    return _torch.strided_shard(placement.dim, pieces) if pieces > 1 else placement


def _on_whole_mesh(
    origin: _torch.DTensorSpec, mesh: DataMesh, layout: Layout
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    whole, dims = mesh.whole, mesh.dims
    assert whole is not None
    assert dims is not None
    names = whole.mesh_dim_names
    assert names is not None
    if origin.mesh != whole:
        raise ValueError(
            f"with dp_mesh_dims parameters have to lie on the mesh that fully_shard was given, "
            f"{whole}, found one on {origin.mesh}"
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        found = origin.placements[names.index(name)]
        if not isinstance(found, Replicate):
            raise ValueError(
                f"expected Replicate() on the data parallel dimension {name!r}, found {found}"
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
    return _torch.join_meshes(joined), tuple(result)
