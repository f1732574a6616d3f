"""This rank's part of gradients and of optimizer states, checked."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor


def gradient(name: str, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, placed as the parameter is.

    Raises:
        RuntimeError: as in torch's optimizers: the parameter is complex, or its gradient is sparse
            or not a ``DTensor`` as the parameter is.
    """
    grad = param.grad
    assert grad is not None
    if torch.is_complex(param):
        raise RuntimeError(f"{name}: found {param.dtype}, expected real numbers")
    if grad.is_sparse:
        raise RuntimeError(f"{name}: found a sparse gradient, expected a dense one")
    if isinstance(param, DTensor):
        if not isinstance(grad, DTensor):
            raise RuntimeError(f"{name}: found a plain gradient, expected a DTensor")
        if tuple(grad.placements) != tuple(param.placements):
            grad = grad.redistribute(param.device_mesh, param.placements)
    return grad


def shard_of_state(name: str, param: torch.Tensor, key: str, state: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a state.

    Raises:
        ValueError: it does not lie as its parameter does.
    """
    shard, mine = dtensor.plain(state), dtensor.plain(param)
    if shard.shape != mine.shape or isinstance(state, DTensor) != isinstance(param, DTensor):
        raise ValueError(
            f"{name}: found a {key} of shape {tuple(shard.shape)} on this rank, expected "
            f"{tuple(mine.shape)}, as the parameter's; load it with shardwise.checkpoint or "
            "torch.distributed.checkpoint, which cut states as parameters are cut"
        )
    return shard
