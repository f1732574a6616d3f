"""What an operation is, by its schema; and what stands in for values.

Some operations return a number, or a tensor whose shape depends on values: ``item()``, ``nonzero``,
``x[mask]``. A rehearsal has no values, and :func:`stand_in` returns something: 1 for a number, and
the largest shape that is possible. The log names the modules in which that was done.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch import fake


@dataclass(frozen=True, slots=True)
class Traits:
    """What the schema of an operation says about all its calls."""

    name: str
    short: str
    namespace: str
    only_views: bool
    writes: bool
    computes: bool


#: They touch no memory.
_IDLE = frozenset(
    {
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
        *("empty_permuted", "set_", "resize_"),
    }
)


@functools.cache
def traits_of(func: Any) -> Traits:
    """Return what the schema of an operation says."""
    name = str(func)
    namespace, _, rest = name.partition(".")
    short = rest.partition(".")[0]
    return Traits(
        name=name,
        short=short,
        namespace=namespace,
        only_views=fake.only_views(func),
        writes=fake.writes(func),
        computes=short not in _IDLE,
    )


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


# -- what depends on values ------------------------------------------------------------------------

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
