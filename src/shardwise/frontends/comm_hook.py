"""FSDP1's communication hooks, as collectives of the runtime's own kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

#: ``hook(state, gradients, output)`` reduces flat gradients of all ranks into this rank's part.
CommHook = Callable[[Any, torch.Tensor, torch.Tensor], object]


class HookedReduceScatter:
    """A reduce-scatter that is the user's hook: it divides too.

    Args:
        hook: reduces, called once per group and dtype with flat gradients.
        state: passed to it.
    """

    def __init__(self, hook: CommHook, state: object) -> None:
        self._hook = hook
        self._state = state

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a buffer for the gradients or the result."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Have the hook reduce ``input_tensor`` into ``output_tensor``."""
        self._hook(self._state, input_tensor, output_tensor)
        if op == dist.ReduceOp.SUM:
            # The runtime divides a sum afterwards, here and for scalars, which no hook sees.
            output_tensor.mul_(group.size())
