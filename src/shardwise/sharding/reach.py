"""From modules to what ``fully_shard`` added to them, and to those nested in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from shardwise.sharding.group import ParamGroup
from shardwise.sharding.hooks import FSDPState, state_of


def require_state(module: object) -> FSDPState:
    """The state of ``module``.

    Raises:
        ValueError: ``fully_shard`` was not applied to it.
    """
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(
            f"expected a module that shardwise.fully_shard was applied to, found "
            f"{type(module).__name__}"
        )
    return state


def states_of(module: object, recurse: bool) -> Iterator[FSDPState]:
    """The state of ``module``; with ``recurse`` also those of the modules in it, each once."""
    top = cast(nn.Module, module)
    found = (state_of(each) for each in (top.modules() if recurse else [top]))
    return iter(dict.fromkeys(state for state in found if state is not None))


def groups_of(module: object, recurse: bool) -> Iterator[ParamGroup]:
    """The groups of those states."""
    for state in states_of(module, recurse):
        yield from state.groups
