"""Optimizers: which parameters they train, and with which settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.app.recipes.core.build import (
    count,
    learning_rate,
)
from shardwise.base.errors import UserError
from shardwise.insight.optimizers import make_optimizer, set_lr
from shardwise.insight.schema.training import (
    OptimizerConfig,
    OptimizerName,
    ScheduleName,
    SgdConfig,
)


@pytest.fixture
def model() -> nn.Sequential:
    """Weights and biases, a norm, and a layer that is not trained."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    layers[2].requires_grad_(requires_grad=False)
    return layers


def test_adamw_decays_matrices_and_neither_norms_nor_biases(model: nn.Sequential) -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.3, beta1=0.8, beta2=0.9)
    matrices, vectors = make_optimizer(model, config).param_groups
    linear, norm, _ = model
    assert [id(p) for p in matrices["params"]] == [id(linear.weight)]
    assert [id(p) for p in vectors["params"]] == [id(linear.bias), id(norm.weight), id(norm.bias)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    for group in (matrices, vectors):
        assert (group["lr"], group["betas"]) == (1e-3, (0.8, 0.9))


def test_a_step_of_adamw_shrinks_what_decays_and_nothing_else(model: nn.Sequential) -> None:
    """Where the gradient is 0, only decay moves a parameter: by the learning rate times it."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    factors = [0.95, 1, 1, 1, 1, 1]
    for old, new, factor in zip(before, model.parameters(), factors, strict=True):
        torch.testing.assert_close(new.detach(), old * factor)


def test_a_model_of_one_kind_of_parameters_has_no_empty_group() -> None:
    """Checkpoints name the groups; an empty one would be a group that no other model has."""
    for model in (nn.Linear(2, 2, bias=False), nn.LayerNorm(2)):
        (group,) = make_optimizer(model, OptimizerConfig(lr=1e-3)).param_groups
        assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_sgd_decays_everything_that_it_trains(model: nn.Sequential) -> None:
    config = SgdConfig(lr=0.1, momentum=0.8, weight_decay=0.01)
    (group,) = make_optimizer(model, config).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.8, 0.01)
    assert [id(p) for p in group["params"]] == [id(p) for p in model[:2].parameters()]


def test_muon_gets_hidden_matrices_and_adamw_the_rest(model: nn.Sequential) -> None:
    config = OptimizerConfig(
        algorithm=OptimizerName.MUON, lr=0.1, weight_decay=0.3, beta1=0.8, beta2=0.9, momentum=0.5
    )
    muon, adamw = make_optimizer(model, config).param_groups
    assert [id(p) for p in muon["params"]] == [id(model[0].weight)]
    assert (muon["algorithm"], muon["lr"], muon["weight_decay"]) == ("muon", 0.1, 0.3)
    assert (muon["momentum"], muon["adjust_lr_fn"]) == (0.5, "match_rms_adamw")
    assert (adamw["algorithm"], adamw["lr"], adamw["weight_decay"]) == ("adamw", 0.1, 0.0)
    assert adamw["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(("given", "momentum"), [(None, 0.9), (0.0, 0.0), (0.5, 0.5)])
def test_sgd_has_momentum_unless_it_is_given(
    model: nn.Sequential, given: float | None, momentum: float
) -> None:
    config = OptimizerConfig(algorithm=OptimizerName.SGD, lr=0.1, momentum=given)
    matrices, vectors = make_optimizer(model, config).param_groups
    assert matrices["momentum"] == vectors["momentum"] == momentum
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)


def test_a_learning_rate_is_set_in_every_group(model: nn.Sequential) -> None:
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3))
    set_lr(optimizer, 0.25, peak=1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("algorithm", OptimizerName)
def test_settings_by_names_go_with_every_optimizer(
    model: nn.Sequential, algorithm: OptimizerName
) -> None:
    rules = ("*.bias:lr=0.02", "0.weight:weight-decay=0.5", "1.bias:weight_decay=0.25")
    config = OptimizerConfig(lr=0.1, weight_decay=0.3, algorithm=algorithm, param_groups=rules)
    optimizer = make_optimizer(model, config)
    set_lr(optimizer, 0.05, peak=0.1)  # half of the peak
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {
        "0.weight": (0.05, 0.5),
        "0.bias": (0.01, 0.0),
        "1.weight": (0.05, 0.0),
        "1.bias": (0.01, 0.25),
    }
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_settings_by_names_go_with_sgd_of_the_image_recipe(model: nn.Sequential) -> None:
    config = SgdConfig(lr=0.1, param_groups=("1.*:weight_decay=0",))
    rest, norm = make_optimizer(model, config).param_groups
    assert (rest["param_names"], rest["weight_decay"]) == (["0.weight", "0.bias"], 1e-4)
    assert (norm["param_names"], norm["weight_decay"]) == (["1.weight", "1.bias"], 0.0)


def test_a_pattern_that_does_not_fit_the_model_is_a_wrong_option(model: nn.Sequential) -> None:
    config = OptimizerConfig(lr=0.1, param_groups=("embed*:lr=1",))
    with pytest.raises(UserError, match=r"^--param-group: pattern 'embed\*': found no parameter"):
        make_optimizer(model, config)


def test_lion_and_adafactor_have_defaults_of_their_own() -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    lion, adafactor = map(config.usual_for, (OptimizerName.LION, OptimizerName.ADAFACTOR))
    assert (lion.lr, lion.weight_decay, lion.betas) == (0.25e-3, 0.4, (0.9, 0.99))
    assert (adafactor.lr, adafactor.weight_decay) == (0.025, 0.1)
    assert config.usual_for(OptimizerName.MUON) == config


def test_every_element_counts_once_whatever_its_shape(model: nn.Sequential) -> None:
    assert count(model.parameters()) == 12 + 4 + 4 + 4 + 8 + 2
    assert count([torch.zeros(()), torch.zeros(0, 5)]) == 1


# -- the learning rate -----------------------------------------------------------------------------


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    lr = learning_rate(OptimizerConfig(lr=1.0, warmup=10), 110)
    rates = [lr(step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)  # half way down: 0.1 + 0.9 / 2
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 5), (20, 1), (20, 2), (20, 5), (5, 5)])
def test_short_runs_have_a_learning_rate_too(warmup: int, steps: int) -> None:
    lr = learning_rate(OptimizerConfig(lr=2.0, warmup=warmup), steps)
    rates = [lr(step) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 and math.isfinite(rate) for rate in rates)
    assert max(rates) > 1.0 or warmup == 0


def test_a_run_longer_than_planned_stays_at_the_lowest_rate() -> None:
    """``--steps`` may be lowered for a run that is resumed."""
    lr = learning_rate(OptimizerConfig(lr=1.0, warmup=0), 10)
    assert lr(10) == pytest.approx(0.1)
    assert lr(1000) == pytest.approx(0.1)


def rates(steps: int, **settings: Any) -> list[float]:
    """The learning rates of all steps of a run with a peak of 1."""
    lr = learning_rate(OptimizerConfig(lr=1.0, **settings), steps)
    return [lr(step) for step in range(1, steps + 1)]


def test_a_line_falls_evenly_to_the_lowest_rate() -> None:
    found = rates(30, warmup=10, schedule=ScheduleName.LINEAR, min_lr=0.0)
    expected = [*(i / 10 for i in range(1, 11)), *(i / 20 for i in range(19, -1, -1))]
    assert found == pytest.approx(expected)


def test_a_constant_rate_stays_at_its_peak() -> None:
    assert rates(8, warmup=2, schedule=ScheduleName.CONSTANT) == [0.5] + [1.0] * 7


def test_a_stable_rate_decays_in_the_last_tenth_by_the_square_root() -> None:
    found = rates(100, warmup=4, schedule=ScheduleName.WARMUP_STABLE_DECAY, min_lr=0.0)
    assert found[3:90] == [1.0] * 87
    assert found[90:] == pytest.approx([1 - math.sqrt(i / 10) for i in range(1, 11)])


@pytest.mark.parametrize("schedule", [each for each in ScheduleName if each.value != "constant"])
def test_any_decay_can_begin_late_and_a_longer_run_begins_it_later(schedule: ScheduleName) -> None:
    settings = {"warmup": 2, "schedule": schedule, "decay_steps": 4, "min_lr": 0.25}
    short, long = rates(10, **settings), rates(30, **settings)
    assert short[:6] == long[:6], "a run that is resumed before its decay goes on as a longer one"
    assert short[1:6] == [1.0] * 5
    assert long[1:26] == [1.0] * 25
    assert short[-4:] == pytest.approx(long[-4:])
    assert short[-4] < 1.0
    assert short[-1] == 0.25


def test_a_decay_longer_than_the_run_begins_after_the_warmup() -> None:
    linear = {"warmup": 2, "schedule": ScheduleName.LINEAR}
    assert rates(6, decay_steps=99, **linear) == rates(6, **linear)
