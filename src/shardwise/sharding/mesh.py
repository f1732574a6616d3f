"""The data parallel mesh: which ranks shard, which replicate, and what moves bytes between them.

A user's mesh is checked before anything is changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._torch import dtensor
from shardwise._torch.fsdp import DataParallelMeshDims
from shardwise.base import devices
from shardwise.base.errors import MisuseError
from shardwise.transport.base import LocalTransport, Transport
from shardwise.transport.custom import AllGather, ReduceScatter
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.select import ChannelOptions, compose
from shardwise.transport.wire import PLAIN, Wires


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
        """Check a mesh, and choose a transport for each of its dimensions.

        Args:
            mesh: the data parallel mesh or, with ``dims``, a mesh that includes it.
            transport: the transport to use; see ``select_transport``.
            dims: the data parallel dimensions of ``mesh``.
            what: the name of what will be sharded, for messages.
            wires: the wires of its dimensions.

        Raises:
            ValueError: the mesh is neither 1-D nor 2-D, or has other dimensions than data parallel
                ones; this rank is not part of it, or lacks the device; ``mesh`` has no such
                ``dims``, or no dimension that has a wire by name.
        """
        check_member(mesh, what)
        if dims is None:
            check_mesh(mesh, what)
            wires.check_names(_names_of(mesh), f"{what} on rank {dist.get_rank()}")
            return cls._over(mesh, transport, mesh.ndim - 1, wires)
        _check_dims(mesh, dims)
        data = _data_parallel_part(mesh, dims)
        wires.check_names(_names_of(data), f"{what} on rank {dist.get_rank()}")
        made = cls._over(data, transport, data.ndim - 1 if dims.shard_names else None, wires)
        return dataclasses.replace(made, outer=mesh, dims=dims)

    @classmethod
    def _over(
        cls, mesh: DeviceMesh, transport: str | None, shard_dim: int | None, wires: Wires
    ) -> DataMesh:
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

    @property
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


def _names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the dimensions of a data parallel mesh, for reports."""
    return mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ("replicate", "shard"))


def _group_for(purpose: str, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the process group of some ranks for a purpose, the same one every time."""
    made = Peers().once(_groups)
    key = (purpose, *ranks)
    if key not in made:
        made[key] = new_group(ranks)
    return made[key]


def _groups(world: Peers) -> dict[tuple[object, ...], dist.ProcessGroup]:
    """Keep the process groups, by their purposes and ranks."""
    return {}


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


#: Usual names of dimensions over which ranks see the same data, or have different layers.
_NOT_DATA_PARALLEL = {"tp": "tensor parallel", "pp": "pipeline parallel"}
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


def check_mesh(mesh: DeviceMesh, what: str) -> None:
    """Check a data parallel mesh: 1-D ``(shard,)`` or 2-D ``(replicate, shard)``.

    Args:
        mesh: the mesh.
        what: the name of what will be sharded, for messages.

    Raises:
        ValueError: it has more dimensions, or their names say that they are not data parallel or
            in the wrong order.
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
            f"{where}: expected the replicating dimension first and the sharding dimension last, "
            f"found {shown}, which by their names are in the opposite order. Make the mesh with "
            f"{second!r} before {first!r}"
        )


def check_member(mesh: DeviceMesh, what: str) -> None:
    """Check that this rank is part of ``mesh`` and has its type of device.

    Raises:
        ValueError: it is not part of it, or has no such device.
    """
    rank, kind = dist.get_rank(), mesh.device_type
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{what}: rank {rank} is not part of {mesh}, in a world of {dist.get_world_size()} "
            "ranks; call fully_shard only on the ranks of the mesh, or make a mesh of all ranks"
        )
    accelerator = devices.accelerator()
    has = accelerator.type if accelerator is not None else None
    if kind not in ("cpu", has):
        raise ValueError(
            f"{what} on rank {rank}: the mesh is on {kind!r} devices, found "
            f"{has or 'no accelerator'} on this host; expected a mesh of "
            f"{' or '.join(repr(each) for each in ('cpu', has) if each)}. Make it with "
            f"init_device_mesh({devices.default_type()!r}, ...)"
        )


def check_beside(param: nn.Parameter, fqn: str, mesh: DeviceMesh) -> None:
    """Check that a ``param`` with tensor parallelism can be sharded over ``mesh``, too.

    Raises:
        MisuseError: its mesh and ``mesh`` share ranks other than this one.
        ValueError: the two meshes are on different devices, or are not slices of one mesh.
    """
    if not isinstance(param, DTensor):
        return
    other = param.device_mesh
    where = f"{fqn} on rank {dist.get_rank()}"
    if other.device_type != mesh.device_type:
        raise ValueError(
            f"{where}: it is on a mesh of {other.device_type!r} devices, {other}, expected "
            f"{mesh.device_type!r} as in the mesh to shard over, {mesh}; make one mesh of all "
            "dimensions and slice both out of it"
        )
    with dtensor.real_tensors():
        common = set(other.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
    if len(common) > 1:
        raise MisuseError(
            f"{where}: it is a DTensor on {other} with placements {param.placements}, found ranks "
            f"{sorted(common)} also in the mesh to shard over, {mesh}; expected meshes that have "
            'only this rank in common, as mesh["tp"] and mesh["dp"] of one mesh do. Was it sharded '
            "by an earlier call, or cut over the data parallel dimension?"
        )
    advice = 'make one mesh, as init_mesh(dp=2, tp=2), and use mesh["tp"] and mesh["dp"] of it'
    if other.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise ValueError(
            f"{where}: it is on {other}, and is to be sharded over {mesh}; expected both to have "
            f"named dimensions: {advice}"
        )
    try:
        dtensor.join_meshes([mesh, other])
    except RuntimeError as error:
        raise ValueError(
            f"{where}: it is on {other}, and is to be sharded over {mesh}; expected "
            f"two slices of one mesh: {advice}"
        ) from error
