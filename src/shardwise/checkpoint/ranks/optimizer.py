"""An optimizer's state under the names of its parameters.

An optimizer numbers its parameters in the order in which it was given them. Names outlive that
order, and the mesh too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.optim_names import keys_in_order, names_in_order, without_wrappers

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def parameter_names(model: nn.Module, saved: Mapping[str, Any]) -> dict[Tensor, str]:
    """The name of each parameter in the model's state dict.

    Args:
        model: the model.
        saved: its state dict.

    Returns:
        Names by parameter; for a parameter with several names, the first.
    """
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        name = without_wrappers(name)
        if name not in saved and name.removeprefix("module.") in saved:
            name = name.removeprefix("module.")
        names[parameter] = name
    return names


def optimizer_tree(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The state of an optimizer, with names in place of numbers.

    Args:
        optimizer: the optimizer.
        names: names by parameter.

    Returns:
        ``{"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [name], "lr": ...}]}``,
        and anything else that the optimizer's own state dict has.

    Raises:
        ValueError: the optimizer has a parameter that is not one of the model's.
    """
    packed = dict(optimizer.state_dict())
    by_number = dict(zip(keys_in_order(packed), names_in_order(optimizer, names), strict=True))
    state = {by_number.get(key, key): value for key, value in packed.pop(STATE).items()}
    return {
        **packed,
        **({STATE: state} if state else {}),  # other ranks may have one
        GROUPS: [
            {**group, PARAMS: [by_number[number] for number in group[PARAMS]]}
            for group in packed[GROUPS]
        ],
    }
