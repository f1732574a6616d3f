"""Make a device mesh with named dimensions, over all ranks."""

from __future__ import annotations

import functools
import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.base import devices
from shardwise.transport.peers import make_together


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
    if not dist.is_initialized():
        dist.init_process_group()
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
    if not dist.is_initialized():
        dist.init_process_group()
    try:
        devices.check_type(device_type)
    except devices.UnusableError as error:
        raise ValueError(f"device_type on rank {dist.get_rank()}: {error}") from None
    make = functools.partial(init_device_mesh, device_type, shape, mesh_dim_names=names)
    if len(shape) == 1 and device_type == "cpu":
        return make()  # its process group is the default one
    named = "" if names is None else f" ({', '.join(names)})"
    return make_together(make, f"a mesh of shape {shape}{named}")


def default_mesh() -> DeviceMesh:
    """Make a 1-D mesh over all ranks, on the accelerator if there is one, else on CPUs."""
    if not dist.is_initialized():
        dist.init_process_group()
    return make_mesh(devices.default_type(), (dist.get_world_size(),))
