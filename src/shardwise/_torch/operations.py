"""Private names of operations as torch dispatches them: what they take, write and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary


def is_operation(function: object) -> bool:
    """Whether ``function`` is an operation on tensors, and takes no functions itself."""
    return isinstance(function, torch._ops.OpOverload)


def is_random(function: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in function.tags


def written_by(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation with these arguments writes to; none of others."""
    found: list[torch.Tensor] = []
    if not is_operation(function):
        return found
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += tensors_in(given)
    return found


def leaves(value: object) -> list[Any]:
    """Return what is in lists, tuples, dicts and other containers that torch knows."""
    return pytree.tree_leaves(value)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors in lists, tuples and dicts."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return lists, tuples and dicts with other tensors in place of those that are in them."""
    return pytree.tree_map_only(torch.Tensor, change, value)


def by_tensor() -> Any:
    """Make a dict whose keys are tensors: by identity, for as long as they live."""
    return WeakTensorKeyDictionary()
