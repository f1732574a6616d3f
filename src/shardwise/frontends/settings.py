"""The settings of one FSDP unit, and the mesh that a constructor's arguments ask for.

given                       FULL_SHARD, SHARD_GRAD_OP   NO_SHARD          HYBRID_SHARD, _ZERO2
a process group             (its ranks,)                (its ranks, 1)    an error
two process groups          an error                    an error          (second, first)
a 1-D mesh                  as it is                    (its ranks, 1)    an error
a 2-D mesh                  an error                    if it is (N, 1)   as it is
nothing                     (all ranks,)                (all ranks, 1)    (hosts, ranks of a host)
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shardwise.base import devices
from shardwise.base.errors import MisuseError
from shardwise.frontends.device_mesh import check_member, join_world
from shardwise.frontends.strategies import REPLICATE, SHARD, Strategy, resolve
from shardwise.transport.peers import Peers, new_group
from shardwise.transport.wire import Wire


@dataclass(frozen=True)
class UnitSettings:
    """How one unit is sharded.

    Attributes:
        strategy: the sharding strategy.
        mesh: the ranks.
        reshard_after_forward: as for ``fully_shard``.
        mixed_precision: dtypes of parameters, reduction and buffers.
        cpu_offload: whether shards are kept on the host.
        backward_prefetch: whether backward gathers one unit ahead.
        transport: the transport, as for ``fully_shard``.
        wire: the formats on the wire, as there.
    """

    strategy: ShardingStrategy
    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    transport: str | None = None
    wire: Wire | Mapping[str, Wire] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitSettings:
        """Copies of a module share the settings: they are sharded over the same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return devices.current(self.mesh.device_type)


#: Arguments without effect: the values that ask for what happens anyway, and a note for others.
WithoutEffect = Mapping[str, tuple[Collection[object], str]]


def warn_without_effect(given: Mapping[str, object], table: WithoutEffect, stacklevel: int) -> None:
    """Warn about each argument that has no effect and asks for something else than happens.

    Args:
        given: arguments of a constructor by name.
        table: those of them that have no effect.
        stacklevel: as for ``warnings.warn``, as seen from the caller.
    """
    for argument, (values, note) in table.items():
        if given[argument] not in values:
            warnings.warn(f"{argument}: {note}", stacklevel=stacklevel + 1)


#: One process group, or for hybrid strategies the sharding group and the replicating group.
Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]

_Shape = tuple[str, tuple[int, ...]]
_Meshes = weakref.WeakValueDictionary[_Shape, DeviceMesh]


def find_mesh(
    strategy: Strategy,
    groups: Groups | None,
    mesh: DeviceMesh | None,
    device_id: int | torch.device | None = None,
) -> DeviceMesh:
    """The mesh to shard over; see the table above.

    Args:
        strategy: determines the number of dimensions.
        groups: the constructor's ``process_group``.
        mesh: the constructor's ``device_mesh``.
        device_id: the constructor's ``device_id``; determines the type of device.

    Raises:
        ValueError: both are given, or what is given does not fit the strategy.
    """
    if mesh is not None:
        if groups is not None:
            raise ValueError("found process_group and device_mesh, expected one of them")
        check_member(mesh, "FullyShardedDataParallel")
        return _check_mesh(strategy, mesh)
    asked = device_id.type if isinstance(device_id, torch.device) else None
    device_type = asked or devices.default_type()
    if isinstance(groups, tuple | list):
        return _mesh_of_two(strategy, groups, device_type)
    if groups is not None:
        if strategy.is_hybrid:
            raise ValueError(
                f"process_group: {strategy.name} expects two process groups, found one; pass "
                "process_group=(sharding group, replicating group), or a 2-D device_mesh"
            )
        ranks = dist.get_process_group_ranks(groups)
        if strategy is Strategy.NO_SHARD:
            return _replicating(groups, ranks, device_type)
        return DeviceMesh.from_group(groups, device_type, mesh_dim_names=(SHARD,))
    return _over_all_ranks(strategy, device_type)


def check_device(device_id: int | torch.device | None, mesh: DeviceMesh, stacklevel: int) -> None:
    """Check that ``device_id`` is the device that this rank computes on.

    Warns where ranks compute on the CPU, which has no device numbers.

    Args:
        device_id: the constructor's argument.
        mesh: the mesh to shard over.
        stacklevel: as for ``warnings.warn``, as seen from the caller.

    Raises:
        MisuseError: this rank computes on another device.
    """
    if device_id is None or (mesh.device_type == "cpu" and device_id == torch.device("cpu")):
        return
    if mesh.device_type == "cpu":
        note = f"device_id: {device_id!r} has no effect where ranks compute on the CPU"
        warnings.warn(note, stacklevel=stacklevel + 1)
        return
    index = device_id if isinstance(device_id, int) else device_id.index
    current = devices.current(mesh.device_type).index
    if index is not None and index != current:
        raise MisuseError(
            f"device_id: rank {dist.get_rank()} computes on {mesh.device_type}:{current}, found "
            f"{device_id!r}; call torch.accelerator.set_device_index({index}) first"
        )


def _check_mesh(strategy: Strategy, mesh: DeviceMesh) -> DeviceMesh:
    replicates = strategy.is_hybrid or strategy is Strategy.NO_SHARD
    if strategy is Strategy.NO_SHARD and mesh.ndim == 1:
        return _replicating(mesh.get_group(), mesh.mesh.tolist(), mesh.device_type)
    if mesh.ndim != (2 if replicates else 1):
        expected = "a 2-D mesh (replicate, shard)" if replicates else "a 1-D mesh"
        advice = "" if replicates else "; HYBRID_SHARD takes a 2-D mesh"
        raise ValueError(
            f"device_mesh: {strategy.name} expects {expected}, found {mesh.ndim} dimensions of "
            f"sizes {tuple(mesh.shape)}{advice}"
        )
    if strategy is Strategy.NO_SHARD and mesh.size(1) != 1:
        raise ValueError(
            f"device_mesh: NO_SHARD replicates over all ranks and expects a shape of (N, 1), found "
            f"{tuple(mesh.shape)}; HYBRID_SHARD takes such a mesh"
        )
    return mesh


def _replicating(group: dist.ProcessGroup, ranks: list[int], device_type: str) -> DeviceMesh:
    """A mesh of shape (N, 1) over the ranks of ``group``."""
    alone = new_group([dist.get_rank()])
    return DeviceMesh.from_group(
        [group, alone],
        device_type,
        mesh=torch.tensor(ranks).view(-1, 1),
        mesh_dim_names=(REPLICATE, SHARD),
    )


def _mesh_of_two(
    strategy: Strategy, groups: tuple[dist.ProcessGroup, ...] | list[dist.ProcessGroup], kind: str
) -> DeviceMesh:
    """The mesh whose rows are sharding groups and whose columns are replicating groups."""
    if not strategy.is_hybrid or len(groups) != 2:
        raise ValueError(
            f"process_group: {strategy.name} expects "
            f"{'two groups (sharding, replicating)' if strategy.is_hybrid else 'one group'}, "
            f"found {len(groups)} in a {type(groups).__name__}"
        )
    shard, replicate = groups
    # A rank knows its own row and column only, so replicas exchange their rows.
    row = dist.get_process_group_ranks(shard)
    rows = Peers(replicate).gather_objects(
        row, "the construction of a mesh from two process groups"
    )
    if len({len(each) for each in rows}) != 1:
        raise ValueError(
            f"process_group: rank {dist.get_rank()} found sharding groups of different sizes, "
            f"{rows}, expected equal sizes"
        )
    return DeviceMesh.from_group(
        [replicate, shard], kind, mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
    )


def _over_all_ranks(strategy: Strategy, device_type: str) -> DeviceMesh:
    join_world()
    world_size = dist.get_world_size()
    hosts = world_size // _ranks_of_a_host(world_size) if strategy.is_hybrid else None
    plan = resolve(strategy, world_size, replicas=hosts)
    meshes = Peers().once(_meshes_in_use)
    mesh = meshes.get((device_type, plan.shape))
    if mesh is None:
        mesh = plan.make_mesh(device_type)
        meshes[device_type, plan.shape] = mesh
    return mesh


def _meshes_in_use(world: Peers) -> _Meshes:
    """Keep the meshes in use over all ranks, but keep none of them alive.

    So modules that are wrapped one by one share process groups.
    """
    return weakref.WeakValueDictionary()


def _ranks_of_a_host(world_size: int) -> int:
    """The number of ranks of each host, which torchrun sets in the environment."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        raise ValueError(
            "LOCAL_WORLD_SIZE: found no such environment variable, expected the number of ranks of "
            "a host: a hybrid strategy without device_mesh shards inside each host. Start with "
            "torchrun, set the variable, or pass a 2-D device_mesh"
        )
    if not text.isdecimal() or not int(text) or world_size % int(text):
        raise ValueError(
            f"LOCAL_WORLD_SIZE: found {text!r}, expected a divisor of the {world_size} ranks; pass "
            "a 2-D device_mesh if hosts have different numbers of ranks"
        )
    return int(text)
