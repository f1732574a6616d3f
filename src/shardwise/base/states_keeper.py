"""What others ask an optimizer about its states: how they are cut, and where they are kept.

Checkpoints, state dicts and plans know no optimizer by its class. They ask its keeper, so a new
optimizer is one file, and one that does not say anything is like those of torch: every state has
the shape and the placements of its parameter, is in memory, and can be made when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class StatesKeeper:
    """How an optimizer keeps its states; by default, as torch's do."""

    state: Any  # of every optimizer

    def new_state(self, param: Tensor) -> Mapping[str, Tensor]:
        """The state of a parameter before its first step.

        Args:
            param: a parameter of the optimizer.

        Returns:
            Tensors by name, with shapes, dtypes and placements of their own; none where they follow
            from the parameter.
        """
        return {}

    def kept(self) -> set[Tensor] | None:
        """Find the parameters whose whole states this rank has, as they are sharded now.

        Returns:
            Those parameters, of which other ranks have no state; ``None``: every rank has its part
            of every state.
        """
        return None

    @property
    def nbytes_kept(self) -> int:
        """Bytes of states of this rank that are kept elsewhere than in memory."""
        return 0

    def home_like(self, value: Tensor) -> Tensor:
        """Return a tensor to read a state into, which ``load_state_dict`` is given then.

        Args:
            value: a tensor of the same shape, dtype and placements. It has no values yet.

        Returns:
            ``value`` itself if such states are in memory, else one where they are kept.
        """
        return value

    def drop_states(self) -> None:
        """Drop all states, and free where they are kept."""
        self.state.clear()

    def forget_layout(self) -> None:
        """Forget what follows from how parameters are cut: they are cut in another way now."""


def inside_of(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those inside of it: that of ``offload``, ``in_backward`` or ``DiLoCo``."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner", None)


def keeper_of(optimizer: torch.optim.Optimizer | None) -> StatesKeeper:
    """Who keeps the states of an optimizer: itself, or one inside of it; by default, as torch's.

    Args:
        optimizer: any optimizer, also one around others; ``None`` has no states.
    """
    keepers = (each for each in inside_of(optimizer) if isinstance(each, StatesKeeper))
    return next(keepers, StatesKeeper())


def drop_states(optimizer: torch.optim.Optimizer | None) -> None:
    """Drop all states of an optimizer, and of those inside of it."""
    for each in inside_of(optimizer):
        if isinstance(each, StatesKeeper):
            each.drop_states()
        else:
            each.state.clear()
