"""Optimizers: which parameters they train, and with which settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.recipes.core.build import count, make_adamw, make_sgd, set_lr, warmup_cosine
from shardwise.recipes.core.config import AdamWConfig, SgdConfig


@pytest.fixture
def model() -> nn.Sequential:
    """Weights and biases, a norm, and a layer that is not trained."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    layers[2].requires_grad_(requires_grad=False)
    return layers


def test_adamw_decays_matrices_and_neither_norms_nor_biases(model: nn.Sequential) -> None:
    config = AdamWConfig(lr=1e-3, weight_decay=0.3, betas=(0.8, 0.9))
    matrices, vectors = make_adamw(model, config).param_groups
    linear, norm, _ = model
    assert [id(p) for p in matrices["params"]] == [id(linear.weight)]
    assert [id(p) for p in vectors["params"]] == [id(linear.bias), id(norm.weight), id(norm.bias)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"]) == (1e-3, (0.8, 0.9))


def test_a_step_of_adamw_shrinks_what_decays_and_nothing_else(model: nn.Sequential) -> None:
    """Where the gradient is 0, only decay moves a parameter: by the learning rate times it."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_adamw(model, AdamWConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = [0.95, 1, 1, 1, 1, 1]
    for old, new, factor in zip(before, model.parameters(), factors, strict=True):
        torch.testing.assert_close(new.detach(), old * factor)


def test_a_model_of_one_kind_of_parameters_has_no_empty_group() -> None:
    """Checkpoints name the groups; an empty one would be a group that no other model has."""
    for model in (nn.Linear(2, 2, bias=False), nn.LayerNorm(2)):
        (group,) = make_adamw(model, AdamWConfig(lr=1e-3)).param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_sgd_decays_everything_that_it_trains(model: nn.Sequential) -> None:
    config = SgdConfig(lr=0.1, momentum=0.8, weight_decay=0.01)
    (group,) = make_sgd(model, config).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.8, 0.01)
    assert [id(p) for p in group["params"]] == [id(p) for p in model[:2].parameters()]


def test_a_learning_rate_is_set_in_every_group(model: nn.Sequential) -> None:
    optimizer = make_adamw(model, AdamWConfig(lr=1e-3))
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_run_longer_than_planned_stays_at_the_lowest_rate() -> None:
    """``--steps`` may be lowered for a run that is resumed."""
    lr = warmup_cosine(AdamWConfig(lr=1.0, warmup=0), 10)
    assert lr(10) == pytest.approx(0.1)
    assert lr(1000) == pytest.approx(0.1)


def test_every_element_counts_once_whatever_its_shape(model: nn.Sequential) -> None:
    assert count(model.parameters()) == 12 + 4 + 4 + 4 + 8 + 2
    assert count([torch.zeros(()), torch.zeros(0, 5)]) == 1
