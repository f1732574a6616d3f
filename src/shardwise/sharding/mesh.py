"""What a ``DeviceMesh`` means to sharding: over which ranks to shard, over which to replicate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise._torch.fsdp import DataParallelMeshDims
from shardwise.sharding.device_mesh import check_member, check_mesh, default_device_type, make_mesh
from shardwise.transport.base import Transport
from shardwise.transport.custom import AllGather, CustomTransport, ReduceScatter, with_custom
from shardwise.transport.local import LocalTransport
from shardwise.transport.peers import new_group
from shardwise.transport.select import select_transport


@dataclass(frozen=True)
class DataMesh:
    """A data parallel mesh: its last dimension shards, the one before it (if any) replicates.

    Attributes:
        mesh: 1-D ``(shard,)`` or ``(replicate,)``, or 2-D ``(replicate, shard)``.
        shard: transport over the ranks that parameters are sharded on; it gathers.
        scatter: transport over the same ranks that reduces; the same one unless asked for.
        replicate: transport over the ranks that hold the same shard; ``None`` where no dimension
            replicates.
        device: where this rank computes.
        requested: the transport that was asked for by argument, if any.
        whole: the mesh that ``dp_mesh_dims`` are dimensions of, where they were given.
        dims: what was given as ``dp_mesh_dims``.
        scatter_group: the process group that reductions have to themselves, if they have one.
    """

    mesh: DeviceMesh
    shard: Transport
    scatter: Transport
    replicate: Transport | None
    device: torch.device
    requested: str | None = None
    whole: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = field(default=None, hash=False)
    scatter_group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        transport: str | None = None,
        dims: DataParallelMeshDims | None = None,
        what: str = "fully_shard",
    ) -> DataMesh:
        """Read a mesh and choose the transport of each of its dimensions.

        Args:
            mesh: the data parallel mesh, or, with ``dims``, one that has more dimensions.
            transport: as for ``select_transport``.
            dims: which dimensions of ``mesh`` are data parallel.
            what: what is to be sharded, for messages.

        Raises:
            ValueError: the mesh is neither 1-D nor 2-D, or its dimensions are named otherwise; this
                rank is not part of it, or has no such device; ``dims`` are not dimensions of it.
        """
        check_member(mesh, what)
        if dims is None:
            check_mesh(mesh, what)
            return cls._over(mesh, transport, shards=True)
        _check_dims(mesh, dims)
        data = _data_parallel_part(mesh, dims)
        made = cls._over(data, transport, shards=bool(dims.shard_names))
        return dataclasses.replace(made, whole=mesh, dims=dims)

    @classmethod
    def _over(cls, mesh: DeviceMesh, transport: str | None, *, shards: bool) -> DataMesh:
        device = device_of(mesh)
        replicates = mesh.ndim == 2 or not shards
        shard = (
            select_transport(mesh.get_group(mesh.ndim - 1), device, transport)
            if shards
            else LocalTransport()
        )
        return cls(
            mesh=mesh,
            shard=shard,
            scatter=shard,
            replicate=select_transport(mesh.get_group(0), device, transport)
            if replicates
            else None,
            device=device,
            requested=transport,
        )

    @property
    def shards(self) -> bool:
        """Whether a dimension shards; without one, parameters are replicated."""
        return self.mesh.ndim == 2 or self.replicate is None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the dimension that shards."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The dimension that shards, as a mesh of its own."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    @property
    def world_size(self) -> int:
        """Number of ranks that gradients are averaged over."""
        return self.shard.world_size * (self.replicate.world_size if self.replicate else 1)

    @property
    def own_dims(self) -> frozenset[int]:
        """Which dimensions of ``whole`` are data parallel."""
        if self.whole is None or self.dims is None or self.whole.mesh_dim_names is None:
            return frozenset()
        names = (*self.dims.shard_names, *self.dims.replicate_names)
        return frozenset(self.whole.mesh_dim_names.index(name) for name in names)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Placements of a parameter that is cut along ``dim`` (``None``: not cut)."""
        last: Placement = Replicate() if dim is None else Shard(dim)
        return (Replicate(), last) if self.mesh.ndim == 2 else (last,)

    def of_groups_of(self, size: int) -> DataMesh:
        """The mesh that keeps parameters sharded over groups of ``size`` ranks.

        Every ``size`` ranks that follow each other form a group. Made without the ranks outside
        this mesh, which may be part of a larger one.
        """
        rows = self.mesh.mesh.view(-1, size)
        me = dist.get_rank()
        own = next(row for row in rows.tolist() if me in row)
        column = rows[:, own.index(me)].tolist()
        groups = [new_group(ranks) for ranks in (column, own)]
        mesh = DeviceMesh.from_group(
            groups, self.mesh.device_type, mesh=rows, mesh_dim_names=("replicate", "shard")
        )
        return self._over(mesh, self.requested, shards=True)

    def with_scatter_group(self, group: dist.ProcessGroup | None) -> DataMesh:
        """The same mesh with reductions over ``group``; ``None``: the group that gathers."""
        carrier = self.shard_group if group is None else group
        scatter = select_transport(carrier, self.device, self.requested)
        if isinstance(self.scatter, CustomTransport):
            scatter = self.scatter.over(scatter, carrier)
        return dataclasses.replace(self, scatter=scatter, scatter_group=group)

    def with_all_gather(self, comm: AllGather) -> DataMesh:
        """The same mesh with an all-gather of the user's."""
        shard = with_custom(self.shard, self.shard_group, all_gather=comm)
        return dataclasses.replace(self, shard=shard)

    def with_reduce_scatter(self, comm: ReduceScatter) -> DataMesh:
        """The same mesh with a reduce-scatter of the user's."""
        group = self.scatter_group or self.shard_group
        scatter = with_custom(self.scatter, group, reduce_scatter=comm)
        return dataclasses.replace(self, scatter=scatter)


def default_mesh() -> DeviceMesh:
    """A 1-D mesh over all ranks, on the accelerator where there is one, else on CPUs."""
    if not dist.is_initialized():
        dist.init_process_group()
    return make_mesh(default_device_type(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank computes under ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _check_dims(mesh: DeviceMesh, dims: DataParallelMeshDims) -> None:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"dp_mesh_dims on rank {dist.get_rank()}: expected a mesh whose dimensions have names, "
            f"found none on {mesh}; make it with mesh_dim_names=..., or with init_mesh(dp=2, tp=2)"
        )
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(
                f"dp_mesh_dims on rank {dist.get_rank()}: expected names among {names}, the mesh's "
                f"dimensions, found {name!r}"
            )


def _data_parallel_part(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    def part(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else dtensor.flatten_mesh(mesh, names)

    parts = [part(names) for names in (dims.replicate_names, dims.shard_names) if names]
    return parts[0] if len(parts) == 1 else dtensor.join_meshes(parts)
