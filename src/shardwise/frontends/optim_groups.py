"""Parameter groups of an optimizer by name, by number, and as another optimizer has them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.optim_names import names_in_order
from shardwise.optim.around import hyperparameters


def names_by_key(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
    """The name of each parameter by its id in the optimizer's state dict."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    found = names.values() if optimizer is None else names_in_order(optimizer, names)
    return dict(enumerate(found))


def groups_like(
    optimizer: torch.optim.Optimizer | None, saved: list[dict[str, Any]], keys: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Saved parameter groups with ids, in the order and with the members of the optimizer's.

    ``Optimizer.load_state_dict`` matches parameters by position, not by id. Parameters that were
    not saved keep the settings that they have. Groups without parameters are matched in order.

    Raises:
        ValueError: parameters of one group were saved with different settings.
    """
    groups = [renamed(group, [keys[name] for name in group["params"]]) for group in saved]
    if optimizer is None:
        return groups
    names = {key: name for name, key in keys.items()}
    group_of = {key: group for group in groups for key in group["params"]}
    empty = iter([hyperparameters(group) for group in groups if not group["params"]])
    made: list[dict[str, Any]] = []
    first = 0
    for own in optimizer.param_groups:
        members = list(range(first, first + len(own["params"])))
        first += len(members)
        found = [(names[key], hyperparameters(group_of[key])) for key in members if key in group_of]
        settings = found[0][1] if found else hyperparameters(own)
        if not members:
            settings = next(empty, settings)
        for name, its in found:
            if its != settings:
                raise ValueError(
                    f"optimizer state: {found[0][0]} and {name} are in one group of the optimizer, "
                    f"found them saved with {settings} and {its}, expected parameters of one group "
                    "to have the same settings; make groups as they were saved"
                )
        made.append({**copy.deepcopy(settings), "params": members})
    return made


def renamed(group: Mapping[str, Any], params: Iterable[Any]) -> dict[str, Any]:
    """A copy of a saved group with other keys in order. Names beside them would be in another."""
    return {**copy.deepcopy(hyperparameters(group)), "params": sorted(params)}


def check_same_groups(
    groups: Iterable[Mapping[str, Any]], names: Mapping[int, str], optimizer: torch.optim.Optimizer
) -> None:
    """Check that groups that have ids of an optimizer have the members of its groups.

    Raises:
        ValueError: they do not, so ids are in another order than its own.
    """
    order = iter(names.values())
    for number, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        expected = sorted(next(order) for _ in own["params"])
        if group["params"] != expected:
            raise ValueError(
                f"optimizer state: group {number}: found {len(group['params'])} parameters, "
                f"expected {len(expected)}, as in the group of the optimizer that begins with "
                f"{expected[:1]}; pass an optimizer that has the groups of the one that was saved"
            )


def made_from(
    optim: torch.optim.Optimizer | None, optim_input: Any
) -> torch.optim.Optimizer | None:
    """The optimizer that was passed, or one with the parameters that one was made from, if any.

    Raises:
        ValueError: both were passed, and have different parameters.
    """
    if optim_input is None:
        return optim
    if isinstance(optim_input, torch.optim.Optimizer):
        made = optim_input
    else:
        given = [dict(each) if isinstance(each, dict) else each for each in optim_input]
        made = torch.optim.Optimizer(given, {})
    if optim is None:
        return made
    its, found = (
        [list(map(id, group["params"])) for group in each.param_groups] for each in (optim, made)
    )
    if its != found:
        raise ValueError(
            f"optim_input: found groups of {list(map(len, found))} parameters, expected those of "
            f"optim, of {list(map(len, its))} parameters, in the same order; pass optim alone"
        )
    return optim
