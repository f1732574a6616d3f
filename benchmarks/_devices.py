"""Which GPU a rank takes. The tests choose in the same way."""

from __future__ import annotations

import os

import torch


def take_gpu(rank: int, world_size: int) -> torch.device:
    """Choose the GPU of a rank, and make it the current one.

    NCCL refuses two ranks of one host on one GPU. So ranks that share one pretend to be on hosts of
    their own. NCCL then moves bytes through sockets, at their speed.

    Args:
        rank: of this process; GPUs are dealt in turn.
        world_size: the number of ranks, all of them on this machine.
    """
    gpus = torch.cuda.device_count()
    if world_size > gpus:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device
