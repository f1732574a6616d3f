"""Clipping by the norm of gradients that no rank holds whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from shardwise import clip_grad_norm_, fully_shard

Ranks = Callable[..., list[Any]]


class _Mixed(nn.Module):
    """Rows that do not divide, a scalar, and a parameter that stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, dtype=torch.float64)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.plain = nn.Parameter(torch.linspace(-1, 1, 4))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.gain + self.plain.square().sum()
        return self.second(hidden.double())


def _clipped(rank: int, world_size: int, shape: tuple[int, ...], norm_type: float) -> None:
    torch.manual_seed(0)
    model = _Mixed()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", shape)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.plain})
    assert not isinstance(model.plain, DTensor)

    x = torch.ones(2, 5)
    model(x).square().sum().backward()
    reference(x).square().sum().backward()
    norm = clip_grad_norm_(model.parameters(), 0.1, norm_type)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)

    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm, expected, check_dtype=False, rtol=1e-6, atol=0)
    assert norm.dtype == torch.float64, "the widest dtype of the gradients"
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        if param.grad is None:
            assert whole.grad is None, name
            continue
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        torch.testing.assert_close(grad, whole.grad, rtol=1e-5, atol=1e-8, msg=name)

    untouched = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    clip_grad_norm_(model.parameters(), 1e6, norm_type)
    after = [param.grad for param in model.parameters() if param.grad is not None]
    for old, new in zip(untouched, after, strict=True):
        assert torch.equal(old, new), "a norm below the limit changes nothing"


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("shape", [(3,), (2, 1), (2, 2)])
def test_equals_clipping_the_whole(ranks: Ranks, shape: tuple[int, ...], norm_type: float) -> None:
    ranks(_clipped, math.prod(shape), shape, norm_type)


def _edges(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(3, 3))
    assert clip_grad_norm_(model.parameters(), 1.0) == 0, "no gradients yet"
    model(torch.ones(1, 3)).sum().backward()
    single = clip_grad_norm_(model.weight, 1e9)
    assert single == pytest.approx(3.0)

    model.weight.grad.to_local().fill_(math.inf)
    assert clip_grad_norm_(model.parameters(), 1.0).isinf()
    with pytest.raises(RuntimeError, match="expected a finite number"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    mesh = init_device_mesh("cpu", (world_size,))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="pending a reduction"):
        clip_grad_norm_(pending, 1.0)


def test_edges(ranks: Ranks) -> None:
    ranks(_edges, 2)


def _on_some_ranks(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    narrow, wide = (
        nn.Parameter(DTensor.from_local(torch.ones(2, dtype=dtype), mesh, [Shard(0)]))
        for dtype in (torch.bfloat16, torch.float32)
    )
    narrow.grad = narrow.detach().clone()
    if rank == 0:
        wide.grad = wide.detach().clone()
    norm = clip_grad_norm_([narrow, wide], 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(6**0.5, rel=1e-2)  # of numbers in bf16


def test_ranks_agree_on_the_dtype_where_some_have_no_gradient(ranks: Ranks) -> None:
    ranks(_on_some_ranks, 2)
