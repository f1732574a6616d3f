"""From modules to what ``fully_shard`` added to them, and to those nested in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

from torch import nn

from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import FSDPState
from shardwise.sharding.module_state import ModuleState, state_of


def require_state(module: object) -> FSDPState:
    """The state of ``module``.

    Raises:
        ValueError: ``fully_shard`` was not applied to it.
    """
    state = state_of(module) if isinstance(module, nn.Module) else None
    if not isinstance(state, FSDPState):
        raise ValueError(
            f"expected a module that shardwise.fully_shard was applied to, found "
            f"{type(module).__name__}"
        )
    return state


def states_of(module: object, recurse: bool = True) -> Iterator[ModuleState]:
    """The state of ``module``, and with ``recurse`` those of the modules in it; each once."""
    top = cast(nn.Module, module)
    found = (state_of(each) for each in (top.modules() if recurse else [top]))
    return iter(dict.fromkeys(state for state in found if state is not None))


def groups_of(module: object, recurse: bool = True) -> Iterator[ParamGroup]:
    """The groups of those states."""
    for state in states_of(module, recurse):
        yield from state.groups


def gather_in_order(module: object) -> None:
    """Have every forward gather the next group ahead, in the order in which modules are registered.

    For models that run their modules in that order, and loops that write to parameters between
    steps only: what is written to a group after the forward of the one before it began is missed.
    """
    states = [state for state in states_of(module) if state.groups]
    for state, following in itertools.pairwise(states):
        state.forward_prefetch = [following]
