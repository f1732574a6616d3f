"""Private names of torch for losses: what backward keeps, and collectives that a plan sees."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.distributed._functional_collectives import all_reduce, wait_tensor


def keeps_graph() -> bool:
    """Whether the backward that this thread is in may run again (``retain_graph``)."""
    found: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return found


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``vmap``, or ``is_grads_batched`` of autograd, runs over a dimension of a tensor."""
    return is_batchedtensor(tensor) or is_legacy_batchedtensor(tensor)


def all_reduced(tensor: torch.Tensor, operation: str, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the result of an all-reduce, done as tensor parallelism does it."""
    found: torch.Tensor = wait_tensor(all_reduce(tensor, operation, group))  # type: ignore[no-untyped-call]
    return found
