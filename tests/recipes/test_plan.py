"""``--plan`` rehearses what the recipe trains, and stops what cannot fit with what would."""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core.plan import (
    check_fits,
    kept_for_the_run,
    plan_training,
    reporting,
    settings_for,
)
from shardwise.app.recipes.core.recipe import PLAN_FILE
from shardwise.base import devices
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Checkpointing, Strategy
from shardwise.insight.schema.sharding import PrecisionName, ShardingConfig
from shardwise.insight.schema.training import (
    DilocoConfig,
    OptimizerConfig,
    OptimizerName,
    OutputConfig,
    SgdConfig,
    TrainConfig,
)
from tests.recipes.small import ONE_BLOCK, RECIPES

TWO = World(0, 2, 0, 2)
MiB = 2**20


def planned_config(recipe: str) -> Any:
    config: Any = RECIPES[recipe]
    train = replace(config.train, batch_size=2)
    return replace(config, train=train, **ONE_BLOCK.get(recipe, {}))


def _plan(recipe: str, **changes: Any) -> Any:
    config = planned_config(recipe)
    train = replace(config.train, **changes)
    return plan_training(config.blueprint(), train, config.example(), TWO)


@functools.cache
def _usual_plan(recipe: str) -> Any:
    """A plan that tests share."""
    return _plan(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pattern_that_matches_nothing_is_found_before_the_training(recipe: str) -> None:
    given = replace(planned_config(recipe).train.optimizer, param_groups=("nothing*:lr=1",))
    with pytest.raises(UserError, match=r"^--param-group: pattern 'nothing\*': found no parameter"):
        _plan(recipe, optimizer=given)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_planned_for(recipe: str) -> None:
    plan = _usual_plan(recipe)
    rank = plan.ranks[0]
    assert rank.parameters >= plan.numel * 4 // 2
    assert rank.activations > 0 or rank.most
    assert plan.bytes_sent["dp_shard"] > 0
    assert not plan.formulas


def _train(optimizer: Any, **changes: Any) -> TrainConfig:
    return TrainConfig(
        steps=1, batch_size=1, optimizer=optimizer, output=OutputConfig(out=Path("out")), **changes
    )


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (
            _train(OptimizerConfig(lr=1.0)),
            {"clip_grad": 1.0, "diloco": None},
        ),
        # No norm is clipped, and the training shows it.
        (_train(SgdConfig(lr=1.0)), {"clip_grad": math.inf}),
        (
            _train(
                OptimizerConfig(lr=1.0),
                diloco=DilocoConfig(error_feedback=True),
                sharding=ShardingConfig(strategy=Strategy.DILOCO, replicas=2),
            ),
            {"diloco": DilocoConfig(error_feedback=True)},
        ),
        (
            _train(
                OptimizerConfig(lr=1.0),
                diloco=DilocoConfig(wire="ternary"),
                sharding=ShardingConfig(strategy=Strategy.DILOCO, replicas=2),
            ),
            {"diloco": DilocoConfig(wire="ternary")},
        ),
        (
            _train(
                OptimizerConfig(lr=1.0), sharding=ShardingConfig(param_dtype=PrecisionName.BF16)
            ),
            {"param_dtype": "bf16", "shard_dtype": "fp32"},
        ),
        (
            _train(OptimizerConfig(lr=1.0), sharding=ShardingConfig(strategy=Strategy.NO_SHARD)),
            {"transport": "auto", "ranks_per_host": 2},
        ),
    ],
)
def test_settings_are_those_of_the_training(train: TrainConfig, expected: dict[str, Any]) -> None:
    settings = settings_for(train, RECIPES["mnist"].example(), TWO)
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.optimizer is train.optimizer
    assert settings.world.size == 2
    json.dumps(settings.to_json(), allow_nan=False)


@pytest.mark.parametrize("algorithm", OptimizerName)
def test_a_plan_names_the_optimizer_as_the_training_does(algorithm: OptimizerName) -> None:
    train = _train(OptimizerConfig(lr=1.0, algorithm=algorithm))
    settings = settings_for(train, RECIPES["mnist"].example(), TWO)
    assert settings.to_json()["optimizer"] == algorithm.value


@functools.cache
def _apart(config: DilocoConfig | None) -> Any:
    """A plan of two replicas that train apart, which tests share."""
    return _plan(
        "mnist", sharding=ShardingConfig(strategy=Strategy.DILOCO, replicas=2), diloco=config
    )


ROUNDS = DilocoConfig(local_steps=50)
FEW = replace(ROUNDS, wire="ternary")


@pytest.mark.parametrize(
    ("config", "copies"), [(ROUNDS, 2), (replace(ROUNDS, error_feedback=True), 3), (FEW, 3)]
)
def test_the_outer_state_of_diloco_is_counted(config: DilocoConfig, copies: int) -> None:
    more = _apart(config).ranks[0].optimizer - _apart(None).ranks[0].optimizer
    assert more == pytest.approx(copies * 4 * _apart(None).numel, rel=1e-3)  # and a little padding


def test_what_replicas_exchange_is_counted() -> None:
    plain, few = _apart(ROUNDS), _apart(FEW)
    assert plain.exchanged == pytest.approx(4 * plain.numel, rel=1e-3)  # a half, twice
    assert few.exchanged == pytest.approx(plain.exchanged / 18.3, rel=0.05)
    assert few.to_json()["exchange"] == {
        "wire": "ternary",
        "every": 50,
        "bytes_sent": few.exchanged,
    }
    assert "every 50 steps" in str(few)
    assert _usual_plan("mnist").to_json()["exchange"] is None


def test_a_training_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = _usual_plan("lm")
    assert roomy.settings.activation_checkpointing is Checkpointing.NONE
    two_ranks = 2 * (roomy.needed - MiB)
    monkeypatch.setattr(devices, "free_memory", lambda device: two_ranks)
    tight = _plan("lm")
    assert tight.fits is False
    with pytest.raises(
        UserError, match=r"does not fit, 1\.00 MiB too much.* expected --activation"
    ):
        check_fits(tight)
    monkeypatch.setattr(devices, "free_memory", lambda device: 4096)
    with pytest.raises(UserError, match="expected more ranks, or shorter sequences"):
        check_fits(_plan("mnist", batch_size=1))


def test_the_plan_is_handed_to_the_ranks_in_a_file() -> None:
    plan = _usual_plan("mnist")
    with kept_for_the_run(plan):
        path = Path(os.environ[PLAN_FILE])
        assert json.loads(path.read_text()) == json.loads(json.dumps(plan.to_json()))
    assert PLAN_FILE not in os.environ
    assert not path.exists()


def test_a_training_that_cannot_be_rehearsed_is_named_as_such() -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise KeyError("labels")

    config = planned_config("lm")
    example = replace(config.example(), loss=loss)
    with (
        pytest.raises(UserError, match=r"(?s)--plan: .*labels.*; leave out --plan"),
        reporting("--plan", "leave out --plan to train all the same"),
    ):
        plan_training(config.blueprint(), config.train, example, TWO)
