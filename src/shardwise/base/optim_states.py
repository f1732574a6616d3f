"""Optimizers that say what the state of a parameter looks like before it has one, or where it is.

The state of most optimizers has the shape of the parameter, is sharded as it is, and is in memory.
Code that loads the state of another one has to ask it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class MakesStates(Protocol):
    """An optimizer with states of shapes, dtypes or placements of their own."""

    def new_state(self, param: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first step.

        Args:
            param: a parameter of the optimizer.

        Returns:
            Tensors by name: ``DTensor`` s with values where the parameter is one.
        """
        ...


def new_state(optimizer: torch.optim.Optimizer | None, param: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before its first step, if the optimizer says what it looks like.

    Args:
        optimizer: the optimizer, or one around it, as ``DiLoCo`` is.
        param: one of its parameters.

    Returns:
        Tensors by name; nothing if the states are as those of other optimizers.
    """
    while optimizer is not None:
        if isinstance(optimizer, MakesStates):
            return optimizer.new_state(param)
        optimizer = getattr(optimizer, "inner", None)
    return {}


@runtime_checkable
class KeepsStates(Protocol):
    """An optimizer that keeps states elsewhere than in memory."""

    def home_like(self, value: Tensor) -> Tensor:
        """Return a tensor to read a state into, which ``load_state_dict`` is given then.

        Args:
            value: a tensor of the same shape, dtype and placements, without values.

        Returns:
            ``value`` itself if such states are kept in memory.
        """
        ...


def home_like(optimizer: torch.optim.Optimizer | None, value: Tensor) -> Tensor:
    """A tensor to read a state into, where the optimizer keeps its states.

    Args:
        optimizer: the optimizer, or one around it, as ``DiLoCo`` is.
        value: a tensor of the same shape, dtype and placements, without values.

    Returns:
        ``value`` itself if the optimizer keeps states in memory.
    """
    while optimizer is not None:
        if isinstance(optimizer, KeepsStates):
            return optimizer.home_like(value)
        optimizer = getattr(optimizer, "inner", None)
    return value
