"""Collectives of a user's own, by way of torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import FSDPModule


class Custom:
    """What both have in common.

    Args:
        returns_work: ``False``: only where the runtime asks for it.
    """

    def __init__(self, *, returns_work: bool = False) -> None:
        self._returns_work = returns_work

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate memory for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class CustomGather(Custom):
    """An all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        returns = async_op or self._returns_work
        work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=returns)
        return work


class CustomScatter(Custom):
    """A reduce-scatter.

    Attributes:
        ops: how it was asked to reduce.
    """

    def __init__(self, *, returns_work: bool = False) -> None:
        super().__init__(returns_work=returns_work)
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.ops.append(op)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        returns = async_op or self._returns_work
        work: dist.Work | None = scatter(
            output_tensor, input_tensor, op=op, group=group, async_op=returns
        )
        return work


def customize(model: nn.Module, *, returns_work: bool = False) -> CustomScatter:
    """Have every group of a model use these; return the reduce-scatter."""
    gather = CustomGather(returns_work=returns_work)
    scatter = CustomScatter(returns_work=returns_work)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return scatter
