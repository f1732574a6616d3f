"""Where a rank computes."""

from __future__ import annotations

import torch

from shardwise.launch.world import World
from shardwise.recipes.config import Device, OptionError


def choose_device(wanted: Device, world: World) -> torch.device:
    """The device of this rank, made current.

    ``auto`` takes GPUs where every rank of this host can have one of its own, else CPUs.

    Raises:
        OptionError: GPUs are asked for and there are too few.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = found >= world.local_size
    if wanted is Device.CPU or (wanted is Device.AUTO and not enough):
        return torch.device("cpu")
    if not enough:
        raise OptionError(
            "--device",
            f"cuda with {found} {'GPU' if found == 1 else 'GPUs'}",
            f"a GPU for each of the {world.local_size} ranks of this host, or --device cpu",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """The backends of the default process group: small things travel between CPUs, always."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
