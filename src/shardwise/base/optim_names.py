"""The parameters of an optimizer in the order of its state dict, and their names.

An optimizer does not know names. Its state dict numbers parameters in the order of its groups, so a
state by name needs this order and the names that the model gives its parameters. The frontends,
checkpoints and DiLoCo all go through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: The state that counts the steps of a parameter.
STEP = "step"

#: What wrappers of torch put into names, and state dicts leave out.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def without_wrappers(name: str) -> str:
    """The name of a parameter without what compilation and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def names_of_parameters(model: nn.Module) -> dict[Tensor, list[str]]:
    """The names of each parameter of a model, without those of wrappers, in the model's order.

    A parameter that is tied has several.
    """
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(without_wrappers(name))
    return names


def parameters_in_order(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which its state dict numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_in_group(group: Mapping[str, Any], number: int) -> list[tuple[str, Tensor]]:
    """The parameters of an optimizer's group, each with what messages call it.

    Args:
        group: the group. Those that were made of named parameters know the names.
        number: of the group.
    """
    params = group["params"]
    names = group.get("param_names") or [
        f"parameter {i} of group {number}" for i in range(len(params))
    ]
    return list(zip(names, params, strict=True))


def keys_in_order(state_dict: Mapping[str, Any]) -> list[Any]:
    """The keys that an optimizer's state dict has for its parameters, in their order."""
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def counts(states: Iterable[tuple[str, int, int]]) -> set[str]:
    """The names of states that are scalars for parameters of any shape, such as numbers of steps.

    For a scalar parameter, they have its shape by chance.

    Args:
        states: the name of each state, its dimensions, and those of its parameter.
    """
    return {STEP, *(name for name, ndim, of_param in states if of_param and not ndim)}


def names_in_order(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], what: str = "optimizer"
) -> list[str]:
    """The names of an optimizer's parameters, in the order of :func:`parameters_in_order`.

    Args:
        optimizer: the optimizer.
        names: the name of each parameter of the model.
        what: what error messages call the optimizer.

    Raises:
        ValueError: the optimizer has a parameter that is not in ``names``.
    """
    for i, group in enumerate(optimizer.param_groups):
        for j, param in enumerate(group["params"]):
            if param not in names:
                raise ValueError(
                    f"{what}: found parameter {j} of group {i}, of shape {list(param.shape)}, "
                    "which the model does not have, expected its parameters; create the optimizer "
                    "from model.parameters() after sharding the model, and do not call this inside "
                    "summon_full_params"
                )
    return [names[param] for param in parameters_in_order(optimizer)]
