"""Names of an optimizer's parameters are in the order in which its state dict numbers them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.base.optim_names import keys_in_order, names_in_order, parameters_in_order


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    """An optimizer whose groups have another order than the model."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": [model[1].weight, model[0].weight]}, {"params": [model[0].bias]}]
    return model, torch.optim.Adam(groups)


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def test_order_is_that_of_the_state_dict() -> None:
    model, optimizer = two_groups()
    for number, param in enumerate(parameters_in_order(optimizer)):
        optimizer.state[param]["number"] = number
    packed = optimizer.state_dict()
    assert keys_in_order(packed) == [0, 1, 2]
    assert all(packed["state"][key]["number"] == key for key in keys_in_order(packed))
    assert names_in_order(optimizer, names_of(model)) == ["1.weight", "0.weight", "0.bias"]


def test_a_parameter_of_another_model_is_named_by_its_place() -> None:
    model, optimizer = two_groups()
    names = names_of(model)
    del names[model.get_parameter("0.bias")]
    message = r"inner: found parameter 0 of group 1, of shape \[3\], which the model does not have"
    with pytest.raises(ValueError, match=message):
        names_in_order(optimizer, names, "inner")
