"""Make a device mesh with named dimensions, and check one before anything is changed."""

from __future__ import annotations

import functools
import math
import os
import weakref

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor
from shardwise._torch.fsdp import DataParallelMeshDims
from shardwise.base import devices
from shardwise.base.arguments import check_arguments
from shardwise.base.errors import MisuseError
from shardwise.transport.peers import Peers, make_together


def init_mesh(*, device_type: str | None = None, **sizes: int) -> DeviceMesh:
    """Make a device mesh over all ranks, with named dimensions.

    The last dimension varies fastest: under ``init_mesh(dp=2, tp=4)``, ranks 0 to 3 are the first
    tensor parallel group. The result is that of torch's ``init_device_mesh``. If there is no
    process group yet, the default one is initialized first.

    Args:
        device_type: such as ``"cuda"``. The default is the accelerator if there is one, else
            ``"cpu"``.
        sizes: the number of ranks along each dimension, by name, outermost first. One size may be
            -1, for all remaining ranks.

    Returns:
        The mesh, of as many dimensions as there are ``sizes``.

    Raises:
        ValueError: the product of the sizes is not the number of ranks, or this process cannot
            compute on devices of that type.
        PeerLostError: a rank died, or did not arrive in time.
        RanksDivergedError: another rank makes another mesh.
    """
    check_arguments(init_mesh, locals())
    join_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if not sizes or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(
            f"init_mesh({asked}) on rank {rank}: expected sizes by name, such as dp=2, tp=4; one "
            "of them may be -1"
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
    kind = device_type or devices.default_type()
    return make_mesh(kind, shape, tuple(sizes))


def join_world() -> None:
    """Make the default process group, if there is none.

    Raises:
        ValueError: the environment describes no rank.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise ValueError(
            "environment: found no RANK, expected the variables of a rank. Start the program with "
            "shardwise run --nproc 2 FILE, or torchrun --nproc-per-node 2 FILE, in place of "
            "python FILE; or call it by shardwise.launch or shardwise.simulate"
        )
    dist.init_process_group()


def make_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """Make a device mesh over all ranks, and the default process group if there is none.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ...
        shape: the number of ranks along each dimension.
        names: the names of the dimensions.

    Raises:
        ValueError: this process cannot compute on such devices.
        PeerLostError: a rank died, or did not arrive in time.
        RanksDivergedError: another rank makes another mesh.
    """
    join_world()
    try:
        devices.check_type(device_type)
    except ValueError as error:
        raise ValueError(f"device_type on rank {dist.get_rank()}: {error}") from None
    make = functools.partial(init_device_mesh, device_type, shape, mesh_dim_names=names)
    if len(shape) == 1 and device_type == "cpu":
        return make()  # its process group is the default one
    named = "" if names is None else f" ({', '.join(names)})"
    return make_together(make, f"a mesh of shape {shape}{named}")


def default_mesh() -> DeviceMesh:
    """Make a 1-D mesh over all ranks, on the accelerator if there is one, else on CPUs.

    One that is in use and has the same process group is returned in its place. Torch compares
    meshes in each operation of ``DTensor``s, and knows the same object at once.
    """
    join_world()
    made = make_mesh(devices.default_type(), (dist.get_world_size(),))
    if made.get_group() is not dist.group.WORLD:
        return made  # another rank may have dropped the earlier one, and its group
    return Peers().once(_default_meshes).setdefault(made.device_type, made)


def _default_meshes(world: Peers) -> weakref.WeakValueDictionary[str, DeviceMesh]:
    """Keep default meshes by the type of their devices, but not alive: they hold the group."""
    return weakref.WeakValueDictionary()


#: Usual names of dimensions over which ranks see the same data, or have different layers.
_NOT_DATA_PARALLEL = {"tp": "tensor parallel", "pp": "pipeline parallel"}


def check(mesh: DeviceMesh, dims: DataParallelMeshDims | None, what: str) -> None:
    """Check a mesh to shard over.

    Args:
        mesh: the data parallel mesh or, with ``dims``, a mesh that includes it.
        dims: the data parallel dimensions of ``mesh``.
        what: the name of what will be sharded, for messages.

    Raises:
        ValueError: the mesh is neither 1-D nor 2-D, or has other dimensions than data parallel
            ones; this rank is not part of it, or lacks the device; or ``mesh`` has no such
            ``dims``.
    """
    check_member(mesh, what)
    if dims is None:
        _check_data_parallel(mesh, what)
        return
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


def _check_data_parallel(mesh: DeviceMesh, what: str) -> None:
    """Check a data parallel mesh: 1-D ``(shard,)`` or 2-D ``(replicate, shard)``."""
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
    try:
        devices.check_type(kind)
    except ValueError as error:
        raise ValueError(
            f"{what} on rank {rank}: the mesh is on {kind!r} devices, {error}; make it with "
            f"init_device_mesh({devices.default_type()!r}, ...)"
        ) from None


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
