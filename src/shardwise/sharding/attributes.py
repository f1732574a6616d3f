"""What a program sets on a parameter, ``p.no_weight_decay = True`` say: each form of it shows it.

All forms of a parameter have one ``__dict__``. So what is set on one is seen on the others at once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise._torch import dtensor

#: The attribute of a parameter that another one has taken the place of: the form of that. Modules
#: and optimizers may still hold it.
TAKEN = "_shardwise_form"

_OWN = (nn.Parameter, DTensor)  # classes that keep nothing of their own in ``__dict__``


def carried(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of an original parameter, by name.

    Values are not copied, and tensors among them are not cut. A tensor subclass that keeps its
    values in other tensors has those in attributes, too: they stay behind.
    """
    is_wrapper = not isinstance(param, DTensor) and dtensor.is_wrapper(param)
    return {
        name: value
        for name, value in vars(param).items()
        if name != TAKEN and not (is_wrapper and isinstance(value, torch.Tensor))
    }


def share(param: nn.Parameter, attributes: dict[str, Any]) -> None:
    """Let ``param`` have ``attributes``, and add to them what it has of its own.

    A tensor subclass that keeps values in attributes gets a copy, to which later changes are not
    added.
    """
    if type(param) not in _OWN:
        vars(param).update({key: attributes[key] for key in attributes.keys() - vars(param).keys()})
    elif vars(param) is not attributes:
        attributes.update(vars(param))
        param.__dict__ = attributes


def leave(param: torch.Tensor) -> None:
    """Let ``param``, which is no longer a form of its parameter, keep what it has as its own."""
    if type(param) in _OWN:
        param.__dict__ = {**vars(param)}


def copies(attributes: dict[str, Any], memo: dict[Any, Any]) -> dict[str, Any]:
    """Return deep copies of attributes; what cannot be copied, a process group say, as it is."""
    made = {}
    for name, value in attributes.items():
        try:
            made[name] = copy.deepcopy(value, memo)
        except Exception:  # whatever the class of the value raises
            made[name] = value
    return made
