"""Private names of symmetric memory, and of memory that a process group allocates.

Tried on torch 2.11, 2.12 and 2.13, without a GPU: what needs one was never run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from shardwise import devices


def set_backend(name: str) -> None:
    """Choose the backend that allocates symmetric memory, for the whole process.

    Raises:
        RuntimeError: this torch was built without it, or memory of another one exists.
    """
    _symmetric_memory.set_backend(cast(Any, name))


def has_pools(device: torch.device) -> bool:
    """Whether ``device`` can allocate from a pool that is chosen for a block of code."""
    module = devices.module_of(device)
    return hasattr(module, "use_mem_pool") and hasattr(module, "MemPool")


def allocating_symmetric(device: torch.device) -> AbstractContextManager[object]:
    """Allocate all memory of ``device`` from the pool of symmetric memory, inside the block."""
    pool = _symmetric_memory.get_mem_pool(device)
    return cast(AbstractContextManager[object], devices.module_of(device).use_mem_pool(pool))


def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Let the ranks of ``group`` map each other's ``tensor``. All of them call this.

    Torch keeps the result for each piece of memory, so a second call costs a lookup.
    """
    _symmetric_memory.rendezvous(tensor, group.group_name)


def allocator_of(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[int, torch.dtype], torch.Tensor] | None:
    """Return what allocates 1-D tensors in memory that the backend of ``group`` prefers.

    ``None`` if the backend has no such memory, as gloo does not.
    """
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a process group of another package may have none inside
        return None
    if not backend.supports_tensor_alloc(device):
        return None

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return backend.allocate_tensor(numel, dtype=dtype, device=device)

    return allocate
