"""Which GPU a rank takes. The tests choose in the same way."""

from __future__ import annotations

import os
from enum import Enum

import torch


class Sharing(Enum):
    """How NCCL lets several ranks of one host take one GPU, by the variable that asks for it."""

    #: From 2.30 on, NCCL knows ranks that share a GPU, and copies between them on it.
    MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
    #: Before, it refuses them. So each rank pretends to be on a host of its own, and NCCL moves
    #: bytes through sockets, at their speed.
    HOSTS = "NCCL_HOSTID"

    @classmethod
    def of(cls, version: tuple[int, ...]) -> Sharing:
        """Choose for a version of NCCL, as ``torch.cuda.nccl.version()`` gives it."""
        return cls.MULTI_RANK if version >= (2, 30) else cls.HOSTS


def nccl_version() -> tuple[int, ...]:
    """Return the version of NCCL; empty where torch has none."""
    if not torch.distributed.is_nccl_available():
        return ()
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return version


def take_gpu(rank: int, world_size: int) -> torch.device:
    """Choose the GPU of a rank, and make it the current one.

    Args:
        rank: of this process; GPUs are dealt in turn.
        world_size: the number of ranks, all of them on this machine.
    """
    gpus = torch.cuda.device_count()
    if world_size > gpus:
        sharing = Sharing.of(nccl_version())
        os.environ[sharing.value] = "1" if sharing is Sharing.MULTI_RANK else f"rank {rank}"
        if sharing is Sharing.HOSTS:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device
