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
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from shardwise.errors import MisuseError
from shardwise.frontends.strategies import REPLICATE, SHARD, Strategy, resolve
from shardwise.sharding.mesh import check_member, default_device_type, device_of
from shardwise.transport.peers import gather_objects, new_group


@dataclass(frozen=True)
class UnitSettings:
    """How one unit is sharded.

    Attributes:
        strategy: as the user named it.
        mesh: over which ranks.
        reshard_after_forward: as for ``fully_shard``.
        mixed_precision: in which dtypes.
        cpu_offload: where the shards live.
        backward_prefetch: whether backward gathers ahead.
        transport: what moves the bytes.
    """

    strategy: ShardingStrategy
    mesh: DeviceMesh
    reshard_after_forward: bool | int | None
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    transport: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitSettings:
        """A copy of a module is sharded over the same ranks."""
        return self

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return device_of(self.mesh)


def default_reshard(strategy: ShardingStrategy) -> bool | None:
    """What a strategy says about freeing parameters, in the words of ``fully_shard``.

    ``None``, for those that free them: but not the root's, which backward needs at once.
    """
    plan = resolve(Strategy.of(strategy), 1, replicas=1)
    return None if plan.reshard_after_forward else False


def say_what_has_no_meaning(stacklevel: int, **notes: str | None) -> None:
    """Warn of every argument for which there is a note.

    Args:
        stacklevel: as for ``warnings.warn``, seen from the caller.
        notes: by argument, what to know; ``None`` where there is nothing to say.
    """
    for argument, note in notes.items():
        if note is not None:
            warnings.warn(f"{argument}: {note}", stacklevel=stacklevel + 1)


#: One process group, or for hybrid strategies the one that shards and the one that replicates.
Groups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup]

_Shape = tuple[str, tuple[int, ...]]
_Meshes = weakref.WeakValueDictionary[_Shape, DeviceMesh]

#: The meshes in use over all ranks, by the default process group: modules that are wrapped one by
#: one share the process groups of one mesh. Neither group nor mesh is kept alive by this.
_in_use: weakref.WeakKeyDictionary[dist.ProcessGroup, _Meshes] = weakref.WeakKeyDictionary()


def find_mesh(
    strategy: Strategy,
    groups: Groups | None,
    mesh: DeviceMesh | None,
    device_id: int | torch.device | None = None,
) -> DeviceMesh:
    """The mesh to shard over.

    Args:
        strategy: decides how many dimensions it has.
        groups: ``process_group`` as the user gave it.
        mesh: ``device_mesh`` as the user gave it.
        device_id: as the user gave it; says on which kind of device to compute.

    Raises:
        ValueError: both or neither of what a strategy needs is given, or it does not fit.
    """
    if mesh is not None:
        if groups is not None:
            raise ValueError("expected process_group or device_mesh, found both; pass one of them")
        check_member(mesh, "FullyShardedDataParallel")
        return _check_mesh(strategy, mesh)
    device_type = _device_type(device_id)
    if isinstance(groups, tuple | list):
        return _mesh_of_two(strategy, groups, device_type)
    if groups is not None:
        if strategy.is_hybrid:
            raise ValueError(
                f"{strategy.name} needs two process groups, found one: pass process_group=(the one "
                "that shards, the one that replicates), or a 2-D device_mesh"
            )
        ranks = dist.get_process_group_ranks(groups)
        if strategy is Strategy.NO_SHARD:
            return _replicating(groups, ranks, device_type)
        return DeviceMesh.from_group(groups, device_type, mesh_dim_names=(SHARD,))
    return _over_all_ranks(strategy, device_type)


def note_on_device(device_id: int | torch.device | None, mesh: DeviceMesh) -> str | None:
    """What to say about ``device_id``.

    Raises:
        MisuseError: it is another device than the one that this rank computes on.
    """
    if device_id is None:
        return None
    if mesh.device_type == "cpu":
        if isinstance(device_id, torch.device) and device_id.type == "cpu":
            return None
        return f"{device_id!r} has no meaning where ranks compute on the CPU"
    index = device_id if isinstance(device_id, int) else device_id.index
    current = torch.accelerator.current_device_index()
    if index is not None and index != current:
        raise MisuseError(
            f"device_id: rank {dist.get_rank()} computes on {mesh.device_type}:{current}, found "
            f"{device_id!r}; call torch.accelerator.set_device_index({index}) first"
        )
    return None


def _check_mesh(strategy: Strategy, mesh: DeviceMesh) -> DeviceMesh:
    replicates = strategy.is_hybrid or strategy is Strategy.NO_SHARD
    if strategy is Strategy.NO_SHARD and mesh.ndim == 1:
        return _replicating(mesh.get_group(), mesh.mesh.tolist(), mesh.device_type)
    if mesh.ndim != (2 if replicates else 1):
        expected = "a 2-D one (replicate, shard)" if replicates else "a 1-D one"
        advice = "" if replicates else "; for a 2-D mesh the strategy is HYBRID_SHARD"
        raise ValueError(
            f"device_mesh: {strategy.name} expects {expected}, found {mesh.ndim} dimensions of "
            f"sizes {tuple(mesh.shape)}{advice}"
        )
    if strategy is Strategy.NO_SHARD and mesh.size(1) != 1:
        raise ValueError(
            f"device_mesh: NO_SHARD replicates over all ranks and expects a shape of (N, 1), found "
            f"{tuple(mesh.shape)}; the strategy for this mesh is HYBRID_SHARD"
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
    """The mesh whose rows shard over the first group and whose columns are the second."""
    if not strategy.is_hybrid or len(groups) != 2:
        raise ValueError(
            f"process_group: {strategy.name} expects "
            f"{'two groups (one shards, one replicates)' if strategy.is_hybrid else 'one group'}, "
            f"found {len(groups)} in a {type(groups).__name__}"
        )
    shard, replicate = groups
    # Every replica tells over which ranks it shards: each rank knows its own row and column only.
    row = dist.get_process_group_ranks(shard)
    rows = gather_objects(row, replicate, "the making of a mesh of two process groups")
    if len({len(each) for each in rows}) != 1:
        raise ValueError(
            f"process_group: rank {dist.get_rank()} found replicas of different sizes {rows}; "
            "expected groups that shard over equally many ranks"
        )
    return DeviceMesh.from_group(
        [replicate, shard], kind, mesh=torch.tensor(rows), mesh_dim_names=(REPLICATE, SHARD)
    )


def _over_all_ranks(strategy: Strategy, device_type: str) -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    world_size = dist.get_world_size()
    hosts = world_size // _ranks_of_a_host(world_size) if strategy.is_hybrid else None
    plan = resolve(strategy, world_size, replicas=hosts)
    assert dist.group.WORLD is not None
    meshes = _in_use.setdefault(dist.group.WORLD, weakref.WeakValueDictionary())
    mesh = meshes.get((device_type, plan.shape))
    if mesh is None:
        mesh = plan.make_mesh(device_type)
        meshes[device_type, plan.shape] = mesh
    return mesh


def _ranks_of_a_host(world_size: int) -> int:
    """How many ranks each host has: torchrun says it."""
    text = os.environ.get("LOCAL_WORLD_SIZE")
    if text is None:
        raise ValueError(
            "a hybrid strategy without device_mesh shards inside each host, and finds out by the "
            "environment variable LOCAL_WORLD_SIZE how many ranks a host has; it is not set. Start "
            "with torchrun, set it, or pass a 2-D device_mesh"
        )
    if not text.isdecimal() or not int(text) or world_size % int(text):
        raise ValueError(
            f"LOCAL_WORLD_SIZE: expected a factor of the {world_size} ranks, found {text!r}; hosts "
            "with different numbers of ranks need a 2-D device_mesh"
        )
    return int(text)


def _device_type(device_id: int | torch.device | None) -> str:
    return device_id.type if isinstance(device_id, torch.device) else default_device_type()
