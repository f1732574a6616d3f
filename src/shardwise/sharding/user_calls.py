"""What users ask of a group at any moment: to unshard or reshard it, to save or load its state.

The runtime asks a group to gather and to deliver when a step needs it. A user's call may come in
the middle of a forward or backward, which still needs the full parameters: the program may have
taken them, or views of them, out of the modules. So modules hold shards again at once, and the
memory of the full parameters stays until nothing uses it.

Each function takes a group first. Those for state dicts are hooks of the group's modules, and
ignore what hooks are given besides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from shardwise.base.errors import MisuseError
from shardwise.sharding import states
from shardwise.sharding.group import ParamGroup


def reshard(group: ParamGroup) -> None:
    """Reshard, and free the full parameters unless a forward or backward uses them.

    Raises:
        MisuseError: a module replaced a full parameter, or wrote to it and to its shard.
    """
    if group.is_in_use:
        group.put_shards_back()
    else:
        group.reshard()


def before_state_dict(group: ParamGroup, *_: Any) -> None:
    """Reshard before a state dict is made, if the shards are of one step; a hook.

    Raises:
        StepInterruptedError: an exception has interrupted a step in backward.
        MisuseError: a module replaced a full parameter, or wrote to it and to its shard.
    """
    if group.stepper is not None:
        group.stepper.check_whole()
    _reshard_for_state_dict(group)


def before_load(group: ParamGroup, *_: Any) -> None:
    """Reshard before a state dict is loaded; a hook.

    Raises:
        MisuseError: a forward or backward of the group is under way, with the values of before.
    """
    if group.is_in_use:
        raise MisuseError(
            f"group {group.label.name!r} on rank {dist.get_rank()}: load_state_dict() would have "
            "replaced values that its running forward or backward needs. Load between steps"
        )
    _reshard_for_state_dict(group)


def _reshard_for_state_dict(group: ParamGroup) -> None:
    """Reshard; until the outermost forward is over, memory stays as ``reshard_after_forward`` says.

    A module may have returned views of its parameters.
    """
    is_whole = group.state in (states.SHARDED, states.UNSHARDED)
    if is_whole and group.leader.is_in_forward():
        group.put_shards_back()
    else:
        reshard(group)


def after_load(group: ParamGroup, module: nn.Module | None = None, *_: Any) -> None:
    """Adopt the parameters that a state dict loaded; a hook.

    A tie to which it gave equal values under each name stays. A backward that is under way, and
    still needs the values of before, then raises.

    Args:
        group: the group.
        module: the module that it was loaded into; ``None`` for all.
    """
    if group.is_loading:
        return
    group.refresh(module)
    if not group.is_unsharded:  # otherwise modules hold what was summoned
        for param in group.params:
            if param.is_in(module):
                param.form.tie_again()
    if group.fulls is not None:
        group.fulls.aliased.follow()


@contextmanager
def loading(group: ParamGroup) -> Iterator[None]:
    """Adopt what a state dict loads once inside, at the end, in place of after each module."""
    group.is_loading = True
    try:
        yield
    finally:
        group.is_loading = False
    after_load(group)
