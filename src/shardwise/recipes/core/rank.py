"""One rank's device and memory, and what rank 0 decides for all ranks.

At the end of a step nearly all memory is freed: activations, full gradients. glibc then returns the
top of its heap to the kernel, which has to clear and map each page again for the next step.
Measured on 2 ranks with 2 cores, a Llama with 5 million parameters, 1,024 tokens per rank and step:
16,000 page faults per step and 4 to 9 % of its CPU time, against 190 faults. A process that trains
reaches its peak in every step, so nobody gains from what it returns. glibc's own variables do the
same for other programs (https://man7.org/linux/man-pages/man3/mallopt.3.html).

No two ranks see the same disk: one looks earlier, another through a cache. So where the disk
decides what ranks do together (save, load, start over, delete), rank 0 looks and tells the others.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardwise.checkpoint.ranks.agreement import Ranks, group_for
from shardwise.launch.errors import UserError
from shardwise.launch.world import World
from shardwise.recipes.core.config import Device, OptionError


def choose_device(wanted: Device, world: World) -> torch.device:
    """Return the device of this rank, made current.

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
    """Return the backends of the default process group; small messages always use gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


# Of mallopt(3): numbers of the two settings, and the largest value that the first one takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_IN_HEAP = 32 * 1024 * 1024
_NEVER = 2**31 - 1

#: Whoever has set one of these wants something else.
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have this process keep freed memory, except for allocations above 32 MiB.

    Returns:
        Whether it does now: not where the C library is another, or the user has set one of
        ``VARIABLES``.
    """
    if any(name in os.environ for name in VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Setting either ends glibc's own adjustments, so both are needed.
    return bool(mallopt(_MMAP_THRESHOLD, _MOST_IN_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


T = TypeVar("T")


@dataclass(frozen=True)
class _Refusal:
    """A ``UserError`` on its way to other ranks."""

    text: str
    exit_code: int


def on_rank_zero(doing: str, act: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on every rank.

    Every rank calls it, while no checkpoint is being saved in the background.

    Args:
        doing: what is done, for messages: ``"looking for checkpoints in runs/lm"``.
        act: what rank 0 does; what it returns is small, and pickled.

    Raises:
        UserError: ``act`` raised one, or an ``OSError``; on every rank alike.
        CheckpointError: ``act`` raised anything else, or a rank was lost.
    """
    refused: list[UserError] = []

    def part() -> T | _Refusal:
        try:
            return act()
        except UserError as error:
            refused.append(error)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            refused.append(UserError(f"{doing}: {where}{error.strerror or error}"))
            refused[0].__cause__ = error
        return _Refusal(str(refused[0]), refused[0].exit_code)

    found = Ranks(group_for(None)).first(doing, part)
    if not isinstance(found, _Refusal):
        return found
    error = refused[0] if refused else UserError(found.text)
    error.exit_code = found.exit_code
    raise error
