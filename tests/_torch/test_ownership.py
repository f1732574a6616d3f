"""A tensor that anybody else can still read is never taken for the only reference to its memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from shardwise._torch.dtensor import is_only_reference


def _new() -> torch.Tensor:
    return torch.zeros(8)


def _gradient() -> torch.Tensor:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer(torch.ones(2, 4)).sum().backward()
    grad = layer.weight.grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("make", [_new, _gradient])
def test_a_tensor_that_only_its_caller_has(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    assert is_only_reference(tensor)


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.view(2, 4),
        lambda tensor: tensor[:2],
        lambda tensor: tensor.detach(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.numpy().copy(),  # it could have been kept
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.from_dlpack(tensor),
        lambda tensor: [tensor],
        lambda tensor: {"a": (tensor,)},
        lambda tensor: torch.ones(8, requires_grad=True).mul(tensor),  # autograd keeps it
    ],
)
def test_a_tensor_that_somebody_else_has(keep: Callable[[torch.Tensor], object]) -> None:
    tensor = _new()
    kept = keep(tensor)
    assert not is_only_reference(tensor)
    del kept


def test_the_gradient_of_a_parameter_that_keeps_it() -> None:
    param = torch.nn.Parameter(_new())
    param.grad = _new()
    grad = param.grad
    assert not is_only_reference(grad)


def test_memory_of_another_library() -> None:
    tensor = torch.from_numpy(np.zeros(8))
    assert not is_only_reference(tensor)


def test_a_tensor_that_autograd_knows() -> None:
    tensor = torch.zeros(8, requires_grad=True) * 2
    assert not is_only_reference(tensor)
