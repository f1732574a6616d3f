"""The data parallel mesh: which ranks shard, which replicate, and what moves bytes between them.

The front door has checked a user's mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise._torch.fsdp import DataParallelMeshDims
from shardwise.base import devices
from shardwise.base.errors import MisuseError
from shardwise.transport.base import LocalTransport, Transport
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.select import ChannelOptions, compose, select_transport
from shardwise.transport.wire import PLAIN, Wires

if TYPE_CHECKING:
    from shardwise.transport.custom import AllGather, ReduceScatter


@dataclass(frozen=True)
class DataMesh:
    """A data parallel mesh. Its last dimension shards; the one before it, if any, replicates.

    Attributes:
        mesh: 1-D ``(shard,)`` or ``(replicate,)``, or 2-D ``(replicate, shard)``.
        shard: the transport that gathers, over the ranks of the sharding dimension.
        scatter: the transport that reduces, over the same ranks; usually the same object.
        replicate: the transport over the ranks with the same shard, or ``None`` if no dimension
            replicates.
        device: the device on which this rank computes.
        options: what the transports of the sharding dimension consist of.
        outer: the mesh that has the ``dp_mesh_dims``, if those were given.
        dims: the ``dp_mesh_dims``, if they were given.
        scatter_group: the separate process group for reductions, if there is one.
        wires: what is sent where a dimension leaves the host.
    """

    mesh: DeviceMesh
    shard: Transport
    scatter: Transport
    replicate: Transport | None
    device: torch.device
    options: ChannelOptions = field(default=ChannelOptions(), compare=False)
    outer: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = field(default=None, hash=False)
    scatter_group: dist.ProcessGroup | None = None
    wires: Wires = PLAIN

    def trim(self) -> None:
        """Let the transports give back what they keep for the next reductions."""
        for transport in (self.shard, self.scatter, self.replicate):
            if transport is not None:
                transport.trim()

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        transport: str | None = None,
        dims: DataParallelMeshDims | None = None,
        what: str = "fully_shard",
        wires: Wires = PLAIN,
    ) -> DataMesh:
        """Choose a transport for each dimension of a mesh.

        Args:
            mesh: the data parallel mesh or, with ``dims``, a mesh that includes it.
            transport: the transport to use; see ``select_transport``.
            dims: the data parallel dimensions of ``mesh``.
            what: the name of what will be sharded, for messages.
            wires: the wires of its dimensions.

        Raises:
            ValueError: there is no dimension that has a wire by name.
        """
        if dims is None:
            wires.check_names(_names_of(mesh), f"{what} on rank {dist.get_rank()}")
            return cls._over(mesh, transport, mesh.ndim - 1, wires)
        data = _data_parallel_part(mesh, dims)
        wires.check_names(_names_of(data), f"{what} on rank {dist.get_rank()}")
        made = cls._over(data, transport, data.ndim - 1 if dims.shard_names else None, wires)
        return dataclasses.replace(made, outer=mesh, dims=dims)

    @classmethod
    def _over(
        cls, mesh: DeviceMesh, transport: str | None, shard_dim: int | None, wires: Wires
    ) -> DataMesh:
        if shard_dim is not None:
            _check_order(mesh)
        device = devices.current(mesh.device_type)
        replicates = mesh.ndim == 2 or shard_dim is None
        names = _names_of(mesh)
        for dim, name in enumerate(names):
            Peers(mesh.get_group(dim)).name_dimension(name)

        options = [ChannelOptions(transport, wires.get(name)) for name in names]

        def over(dim: int) -> Transport:
            return compose(mesh.get_group(dim), device, options[dim])

        shard = LocalTransport() if shard_dim is None else over(shard_dim)
        return cls(
            mesh=mesh,
            shard=shard,
            scatter=shard,
            replicate=over(0) if replicates else None,
            device=device,
            options=options[-1],
            wires=wires,
        )

    @property
    def requested(self) -> str | None:
        """The transport that the user asked for by argument, if any."""
        return self.options.transport

    @property
    def shards(self) -> bool:
        """Whether the mesh has a sharding dimension. If not, parameters are replicated."""
        return self.mesh.ndim == 2 or self.replicate is None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the sharding dimension."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The sharding dimension as a 1-D mesh."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    @property
    def world_size(self) -> int:
        """The number of ranks that gradients are averaged over."""
        return self.shard.world_size * (self.replicate.world_size if self.replicate else 1)

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether this rank has no other to reduce gradients with."""
        return self.replicate is None and self.scatter.world_size == 1

    @property
    def own_dims(self) -> frozenset[int]:
        """The indices of the data parallel dimensions of ``outer``."""
        if self.outer is None or self.dims is None or self.outer.mesh_dim_names is None:
            return frozenset()
        names = (*self.dims.shard_names, *self.dims.replicate_names)
        return frozenset(self.outer.mesh_dim_names.index(name) for name in names)

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """The placements of a parameter that is cut along ``dim`` (``None``: not cut)."""
        last: Placement = Replicate() if dim is None else Shard(dim)
        return (Replicate(), last) if self.mesh.ndim == 2 else (last,)

    def of_groups_of(self, size: int) -> DataMesh:
        """Make the 2-D mesh that shards over every ``size`` consecutive ranks.

        It has no wires: what is gathered there was decoded before. Only the ranks of this mesh take
        part. It may be a slice of a larger one.
        """
        with dtensor.real_tensors():
            rows = self.mesh.mesh.view(-1, size)
            me = dist.get_rank()
            own = next(row for row in rows.tolist() if me in row)
            column = rows[:, own.index(me)].tolist()
            groups = [_group_for("smaller meshes", ranks) for ranks in (column, own)]
            # In reports, such gathers belong to the dimension that the ranks are a part of.
            Peers(groups[1]).name_dimension(_names_of(self.mesh)[-1])
            mesh = DeviceMesh.from_group(
                groups, self.mesh.device_type, mesh=rows, mesh_dim_names=("replicate", "shard")
            )
        return self._over(mesh, self.requested, mesh.ndim - 1, PLAIN)

    def with_scatter_group(self, group: dist.ProcessGroup | None) -> DataMesh:
        """The same mesh with reductions over ``group``, or (``None``) over the gathering group."""
        return self._with_scatter(self.options, group)

    def _with_scatter(self, options: ChannelOptions, group: dist.ProcessGroup | None) -> DataMesh:
        reducing = dataclasses.replace(options, all_gather=None)
        scatter = compose(group or self.shard_group, self.device, reducing)
        return dataclasses.replace(self, scatter=scatter, scatter_group=group, options=options)

    def separate_group(self) -> dist.ProcessGroup:
        """Return the process group for reductions over the ranks of the sharding dimension.

        There is one for each set of ranks, since torch keeps groups until the end of the world.
        """
        group = _group_for("reductions", dist.get_process_group_ranks(self.shard_group))
        Peers(group).name_dimension(_names_of(self.mesh)[-1])
        return group

    def over_all_ranks(self) -> Transport:
        """Return the transport of host tensors between all ranks of the mesh."""
        host = self.device.type == devices.CPU.type
        if host and self.mesh.ndim == 1:
            return select_transport(self.mesh.get_group(0), devices.CPU, self.requested)
        with dtensor.real_tensors():
            ranks = self.mesh.mesh.flatten().tolist()
        group = _group_for("agreements", ranks, None if host else devices.GLOO.name)
        return select_transport(group, devices.CPU, self.requested if host else None)

    @property
    def encoded(self) -> list[Transport]:
        """The transports that encode what they send, each once."""
        transports = dict.fromkeys((self.shard, self.scatter, self.replicate))
        return [each for each in transports if each is not None and not each.wire.is_plain]

    def _check_plain(self, what: str, asked: str, *directions: str) -> None:
        """Check that no wire encodes what another collective would send as it is."""
        for transport in (self.shard, self.scatter):
            for direction in directions:
                found = getattr(transport.wire, direction)
                if found != "fp32":
                    raise MisuseError(
                        f"rank {dist.get_rank()}: found {what} ({asked}) beside a wire with "
                        f"{direction}={found!r} for the dimension {_names_of(self.mesh)[-1]!r}, "
                        f"which it would bypass; pass Wire({direction}='fp32', ...) for it, or do "
                        "not ask for the other"
                    )

    def with_all_gather(self, comm: AllGather) -> DataMesh:
        """The same mesh with a custom all-gather.

        Raises:
            MisuseError: a wire encodes what it would gather.
        """
        self._check_plain("an all-gather", "a custom one", "gather")
        options = dataclasses.replace(self.options, all_gather=comm)
        gathering = dataclasses.replace(options, reduce_scatter=None)
        shard = compose(self.shard_group, self.device, gathering)
        return dataclasses.replace(self, shard=shard, options=options)

    def with_reduce_scatter(self, comm: ReduceScatter) -> DataMesh:
        """The same mesh with a custom reduce-scatter.

        Raises:
            MisuseError: a wire encodes what it would reduce.
        """
        self._check_plain("a reduce-scatter", "a custom one", "reduce")
        options = dataclasses.replace(self.options, reduce_scatter=comm)
        return self._with_scatter(options, self.scatter_group)


def _check_order(mesh: DeviceMesh) -> None:
    """Check that ranks shard in ascending order, as those of a process group are numbered.

    Raises:
        ValueError: the mesh would say that a rank has other rows than it has.
    """
    with dtensor.real_tensors():
        rows = mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist()
    for row in rows:
        if row != sorted(row):
            raise ValueError(
                f"rank {dist.get_rank()}: found ranks {row} along the last dimension of {mesh}, "
                f"expected {sorted(row)}; process groups number their ranks in ascending order"
            )


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ("replicate", "shard"))


def _group_for(purpose: str, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return the process group of some ranks for a purpose, the same one every time."""
    made = Peers().once(_groups)
    key = (purpose, *ranks)
    if key not in made:
        made[key] = new_group(ranks, backend=backend)
    return made[key]


def _groups(world: Peers) -> dict[tuple[object, ...], dist.ProcessGroup]:
    return {}


def _data_parallel_part(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    def part(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else dtensor.flatten_mesh(mesh, names)

    parts = [part(names) for names in (dims.replicate_names, dims.shard_names) if names]
    return parts[0] if len(parts) == 1 else dtensor.join_meshes(parts)


_SAYS_NOT_DATA_PARALLEL = re.compile(
    r"(?<![a-z])([tpcsem]p|etp|ring)(?![a-z])|tensor|pipe|stage|context|seq|expert|model|ulysses"
)


def unaveraged_dims(meshes: Iterable[DeviceMesh]) -> dict[str, int]:
    """The number of ranks along each mesh dimension over which nothing of a model is averaged.

    Left out are names that say something else than data parallel, what :func:`mark_separate` was
    called for, and what DiLoCo reduces over.
    """
    meshes = dict.fromkeys(meshes)
    found: dict[str, int] = {}
    with dtensor.real_tensors():
        mine = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
        for root in dict.fromkeys(map(dtensor.root_mesh, meshes)):
            here = root.get_coordinate() or ()
            for dim, name in enumerate(root.mesh_dim_names or () if here else ()):
                line: tuple[Any, ...] = (*here[:dim], slice(None), *here[dim + 1 :])
                ranks = root.mesh[line].tolist()
                is_apart = len(ranks) > 1 and len(mine.intersection(ranks)) == 1
                says_not = _SAYS_NOT_DATA_PARALLEL.search(name.lower())
                if is_apart and not (says_not or Peers(root.get_group(dim)).dimension):
                    found[name] = len(ranks)
    return found


def mark_separate(mesh: DeviceMesh, dims: Collection[str]) -> None:
    """Note that nothing is averaged over ``dims``, of the mesh that ``mesh`` was sliced from.

    Raises:
        ValueError: there is no such dimension.
    """
    root = dtensor.root_mesh(mesh) if dims else mesh
    for dim in dims:
        if dim not in (root.mesh_dim_names or ()) or dim in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"separate_dims on rank {dist.get_rank()}: expected dimensions of "
                f"{root.mesh_dim_names} that the mesh to shard over, {mesh.mesh_dim_names}, was "
                f"sliced without, found {dim!r}"
            )
        Peers(root.get_group(dim)).name_dimension(dim)
