"""What stands in for values: a rehearsal has none.

Some operations return a number, or a tensor whose shape depends on values: ``item()``, ``nonzero``,
``x[mask]``. Here is what they return in a rehearsal: 1 for a number, and the largest shape that is
possible. The log names the modules in which that was done.
"""

from __future__ import annotations

from typing import Any

import torch

MOST_READS = 10_000  # of values in one step; more are a loop that waits for one


def stand_in(name: str, args: tuple[Any, ...]) -> Any:
    """Return what an operation that depends on values returns in a rehearsal.

    Args:
        name: of the operation, such as ``"aten.nonzero.default"``.
        args: its arguments.

    Raises:
        NotImplementedError: there is nothing to stand in for it.
    """
    tensor: torch.Tensor = args[0]
    match name.split(".")[1]:
        case "_local_scalar_dense":
            return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        case "nonzero":
            return tensor.new_empty(tensor.numel(), tensor.ndim, dtype=torch.long)
        case "masked_select":
            return torch.where(args[1], tensor, tensor).flatten()
        case "index":
            return torch.ops.aten.index.Tensor(tensor, _indices(args[1]))
    raise NotImplementedError(name)


def _indices(given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by positions: as many as they have elements."""
    found: list[torch.Tensor | None] = []
    for index in given:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions = index.new_empty(index.numel(), dtype=torch.long)
            found += [positions] * index.ndim
        else:
            found.append(index)
    return found
