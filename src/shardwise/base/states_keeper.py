"""What others ask an optimizer about its states: how they are cut, and where they are kept.

Checkpoints, state dicts and plans know no optimizer by its class. Each has a keeper of its states,
so a new optimizer is one file, and one that does not say anything is like those of torch: every
state has the shape and the placements of its parameter, and is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class StatesKeeper:
    """How an optimizer keeps its states; by default, as torch's do.

    Attributes:
        new_state: returns the state of a parameter before its first step: tensors by name, with
            shapes, dtypes and placements of their own; none where they follow from the parameter.
        kept: finds the parameters whose whole states this rank has, of which other ranks have none;
            ``None``: every rank has its part of every state.
        nbytes_kept: bytes of states of this rank that are kept elsewhere than in memory.
        home_like: returns a tensor to read a state into, which ``load_state_dict`` is given then,
            for one without values of the same shape, dtype and placements.
        drop_states: drops all states, and frees where they are kept; ``None``: ``state.clear()``.
    """

    new_state: Callable[[Tensor], Mapping[str, Tensor]] = lambda _: {}
    kept: Callable[[], set[Tensor] | None] = lambda: None
    nbytes_kept: int = 0
    home_like: Callable[[Tensor], Tensor] = lambda value: value
    drop_states: Callable[[], None] | None = None


@runtime_checkable
class KeepsStates(Protocol):
    """An optimizer that keeps its states in a way of its own."""

    def states_keeper(self) -> StatesKeeper:
        """Say how."""


def inside_of(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """An optimizer, and those inside of it, each once; a user's may call anything ``inner``."""
    seen: set[int] = set()
    while isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = getattr(optimizer, "inner", None)


#: States by a name that no other optimizer gives to its own, and whose they are.
_KEPT_BY = {"exp_avg_codes": "AdamW8bit"}
_HAS_ONLY = {"SGD": ("momentum_buffer",)}  # of those of torch that would leave others unused


def check_goes_on(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Check that an optimizer can go on from a state.

    Torch's would only fail when they step, and ours would leave the state where it is, unused.

    Args:
        optimizer: the optimizer, or one around it.
        name: of the state: ``"exp_avg"``.

    Raises:
        ValueError: it is one of torch's or of ours, and the state is of another one.
    """
    owner, innermost = _KEPT_BY.get(name), type([*inside_of(optimizer)][-1])
    package = innermost.__module__.partition(".")[0]
    whose = f"shardwise.optim.{owner}"
    if owner is None or owner in {each.__name__ for each in innermost.__mro__}:
        whose = "" if name in _HAS_ONLY.get(innermost.__name__, (name,)) else "another optimizer"
    if whose and package in ("torch", "shardwise"):
        found = "torch's " if package == "torch" else "shardwise.optim."
        raise ValueError(
            f"found {name}, a state of {whose}, from which {found}{innermost.__name__} cannot go "
            "on; load it into that optimizer, or load the model alone"
        )


def keeper_of(optimizer: torch.optim.Optimizer | None) -> StatesKeeper:
    """Who keeps the states of an optimizer: itself, or one inside of it; by default, as torch's.

    Args:
        optimizer: any optimizer, also one around others; ``None`` has no states.
    """
    found = (each for each in inside_of(optimizer) if isinstance(each, KeepsStates))
    first = next(found, None)
    return StatesKeeper() if first is None else first.states_keeper()


def drop_states(optimizer: torch.optim.Optimizer | None) -> None:
    """Drop all states of an optimizer, and of those inside of it."""
    for each in inside_of(optimizer):
        own = each.states_keeper().drop_states if isinstance(each, KeepsStates) else None
        (own or each.state.clear)()
