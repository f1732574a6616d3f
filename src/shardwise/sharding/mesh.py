"""What a ``DeviceMesh`` means to sharding: over which ranks to shard, over which to replicate.

Making a device mesh, and saying what is wrong with one before anything is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise._torch.fsdp import DataParallelMeshDims
from shardwise.errors import MisuseError
from shardwise.transport.base import Transport
from shardwise.transport.custom import AllGather, CustomTransport, ReduceScatter, with_custom
from shardwise.transport.local import LocalTransport
from shardwise.transport.peers import made_together, new_group
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


#: Dimensions that people name so, and over which ranks see the same data, or different layers.
_NOT_DATA_PARALLEL = {"tp": "tensor parallel", "pp": "pipeline parallel"}


def init_mesh(*, device_type: str | None = None, **sizes: int) -> DeviceMesh:
    """A device mesh over all ranks, with named dimensions; the last one varies fastest.

    Under ``init_mesh(dp=2, tp=4)`` ranks 0 to 3 are the first tensor parallel group. It is what
    torch's ``init_device_mesh`` makes. Without a process group, it makes the default one first.

    Args:
        device_type: by default the accelerator's where there is one, else ``"cpu"``.
        sizes: the number of ranks along each dimension, by name, outermost first. One of them may
            be -1: as many as are left.

    Raises:
        ValueError: the sizes do not make up the world.
        PeerLostError: a rank is gone, or did not come in time.
        RanksDivergedError: another rank makes another mesh.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not sizes or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"init_mesh({asked}) on rank {rank}: expected sizes by name, such as dp=2, tp=4, of "
            "which one may be -1"
        )
    left = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(left) > 1 or world_size % known or (not left and known != world_size):
        found = "two sizes of -1" if len(left) > 1 else f"a mesh of {known} ranks"
        raise ValueError(
            f"init_mesh({asked}) on rank {rank}: found {found}, expected "
            f"{'a factor of ' if left else ''}the {world_size} ranks of this world. Start as many "
            "processes as the mesh has ranks (torchrun --nproc-per-node), or change a size; one "
            "may be -1"
        )
    shape = tuple(world_size // known if size == -1 else size for size in sizes.values())
    kind = device_type or default_device_type()
    return make_mesh(kind, shape, tuple(sizes))


def make_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A device mesh over all ranks; without a process group, the default one is made first.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        shape: ranks along each dimension.
        names: of the dimensions.

    Raises:
        PeerLostError: a rank is gone, or did not come in time.
        RanksDivergedError: another rank makes another mesh.
    """
    if not dist.is_initialized():
        dist.init_process_group()
    make = functools.partial(init_device_mesh, device_type, shape, mesh_dim_names=names)
    if len(shape) == 1 and device_type == "cpu":
        return make()  # its process group is the default one
    named = "" if names is None else f" ({', '.join(names)})"
    return made_together(make, f"a mesh of shape {shape}{named}")


def default_device_type() -> str:
    """Where ranks compute unless they are told: the accelerator, where there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    """Check a data parallel mesh: 1-D ``(shard,)`` or 2-D ``(replicate, shard)``.

    Args:
        mesh: the mesh.
        what: what is to be sharded over it, for messages.

    Raises:
        ValueError: it has more dimensions, or they are named as others, or in another order.
    """
    where = f"{what} on rank {dist.get_rank()}"
    names = mesh.mesh_dim_names
    shown = f"dimensions {names} of sizes {tuple(mesh.shape)}"
    if mesh.ndim not in (1, 2):
        part = [name for name in names or () if name not in _NOT_DATA_PARALLEL][:2]
        example = ", ".join(f'"{name}"' for name in part) or '"dp"'
        raise ValueError(
            f"{where}: fully_shard expects a 1-D (shard) or 2-D (replicate, shard) DeviceMesh, "
            f"found {mesh.ndim} {shown}. Pass the data parallel part of it, for example "
            f"mesh[{example}], or name its data parallel dimensions by dp_mesh_dims"
        )
    if mesh.ndim == 1 or names is None:
        return
    for name in names:
        if name in _NOT_DATA_PARALLEL:
            others = ", ".join(f'"{each}"' for each in names if each != name)
            raise ValueError(
                f"{where}: expected a mesh whose dimensions (replicate, shard) are both data "
                f"parallel, found {shown}, of which {name!r} is {_NOT_DATA_PARALLEL[name]}. Pass "
                f"mesh[{others}], or name the data parallel dimensions by dp_mesh_dims"
            )
    first, second = names
    if "shard" in first and "repl" in second:
        raise ValueError(
            f"{where}: expected the dimension that replicates first and the one that shards last, "
            f"found {shown}, by their names in the other order. Make the mesh with {second!r} "
            f"before {first!r}"
        )


def check_member(mesh: DeviceMesh, what: str) -> None:
    """Check that this rank is part of ``mesh``, and has its device.

    Raises:
        ValueError: it is not, or has not.
    """
    rank, kind = dist.get_rank(), mesh.device_type
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{what}: rank {rank} is not part of {mesh}, in a world of {dist.get_world_size()} "
            "ranks; call fully_shard only on the ranks of the mesh, or make a mesh of all ranks"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has = accelerator.type if accelerator is not None else None
    if kind not in ("cpu", has):
        raise ValueError(
            f"{what} on rank {rank}: the mesh is on {kind!r} devices, found "
            f"{has or 'no accelerator'} on this host; expected a mesh of "
            f"{' or '.join(repr(each) for each in ('cpu', has) if each)}. Make it with "
            f"init_device_mesh({default_device_type()!r}, ...)"
        )


def check_beside(param: nn.Parameter, fqn: str, mesh: DeviceMesh) -> None:
    """Check that what tensor parallelism left of ``param`` can be sharded over ``mesh``.

    Raises:
        ValueError: its mesh and ``mesh`` are on different devices, share dimensions, or are not
            slices of one mesh.
    """
    if not isinstance(param, DTensor):
        return
    other = param.device_mesh
    where = f"{fqn} on rank {dist.get_rank()}"
    if other.device_type != mesh.device_type:
        raise ValueError(
            f"{where}: it lies on a mesh of {other.device_type!r} devices, {other}, expected "
            f"{mesh.device_type!r} as in the mesh to shard over, {mesh}; make one mesh of all "
            "dimensions and slice both out of it"
        )
    common = set(other.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
    if len(common) > 1:
        raise MisuseError(
            f"{where}: it is a DTensor on {other} with placements {param.placements}, found ranks "
            f"{sorted(common)} also in the mesh to shard over, {mesh}; expected meshes that meet "
            'in this rank only, as mesh["tp"] and mesh["dp"] of one mesh do. Was it sharded by '
            "an earlier call, or cut over the data parallel dimension?"
        )
    advice = 'make one mesh, as init_mesh(dp=2, tp=2), and use mesh["tp"] and mesh["dp"] of it'
    if other.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise ValueError(
            f"{where}: it lies on {other}, and is to be sharded over {mesh}; expected dimensions "
            f"with names on both: {advice}"
        )
    try:
        dtensor.join_meshes([mesh, other])
    except RuntimeError as error:
        raise ValueError(
            f"{where}: it lies on {other}, which is not a slice of the mesh that the one to shard "
            f"over is a slice of, {mesh}; {advice}"
        ) from error
