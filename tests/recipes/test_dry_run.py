"""``--dry-run`` says what ranks hold, for every recipe, and starts and writes nothing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core.job import TrainingJob
from shardwise.app.recipes.core.plan import describe, plan_training
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.frontends.strategies import Strategy
from shardwise.insight.planning.text import bytes_needed
from shardwise.insight.schema.sharding import PrecisionName, ShardingConfig
from shardwise.insight.schema.training import DilocoConfig
from tests.cli.shell import call
from tests.recipes.small import ONE_BLOCK, RECIPES
from tests.recipes.test_plan import planned_config

TWO = World(0, 2, 0, 2)


# What a dry run shows, plans have, and of those `make test` makes one for every recipe.
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=() if name in ("lm", "mnist") else pytest.mark.long)
        for name in RECIPES
    ],
)
def test_every_recipe_shows_what_ranks_would_hold(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    recipe: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    small: dict[str, Any] = ONE_BLOCK.get(recipe, {})
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in small.items())
    words = f"train {recipe} --dry-run --world-size 3 {options}"
    assert call(*words.split()) == 0
    shown = capsys.readouterr().out
    assert "over dp_shard=3: every parameter is split into 3 shards" in shown
    found = re.search(r"([\d,]+) parameters in", shown)
    assert found is not None
    config: Any = RECIPES[recipe]
    blueprint = dataclasses.replace(config, **small).blueprint()
    expected = sum(parameter.numel() for parameter in blueprint.model.parameters())
    assert int(found[1].replace(",", "")) == expected
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    assert not list(tmp_path.iterdir()), "nothing was written"


def _described(recipe: str, **changes: Any) -> str:
    config = planned_config(recipe)
    train = dataclasses.replace(config.train, **changes)
    return describe(config.blueprint(), train, config.example(), TWO)


def _shards(text: str) -> float:
    """MiB of the shards of one rank, from the table of groups."""
    found = re.search(r"^(?:total|the model) .* ([\d.]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_what_a_step_needs_is_what_the_plan_says() -> None:
    config = planned_config("mnist")
    blueprint, example = config.blueprint(), config.example()
    plan = plan_training(blueprint, config.train, example, TWO)
    shown = describe(blueprint, config.train, example, TWO)
    for cells in bytes_needed(plan):
        for row in cells.rows:
            assert " ".join(row).split() in [line.split() for line in shown.splitlines()]
    assert f"peak: {plan.ranks[0].peak_moment}" in shown
    of_this_host = "fits|does not fit|free on this host|seconds|calibrate"
    assert not re.search(of_this_host, shown)


def test_shards_in_bf16_take_half_the_memory() -> None:
    bf16 = ShardingConfig(shard_dtype=PrecisionName.BF16)
    model = planned_config("mnist").blueprint().model
    # Two ranks have half of the parameters each, in two bytes.
    expected = sum(parameter.numel() for parameter in model.parameters()) / 2**20
    assert _shards(_described("mnist", sharding=bf16)) == pytest.approx(expected, abs=0.01)


def test_copies_of_the_model_are_told() -> None:
    apart = ShardingConfig(strategy=Strategy.DILOCO, replicas=2)
    shown = _described("mnist", sharding=apart, diloco=DilocoConfig())
    assert "diloco over dp_replicate=2 x dp_shard=1" in shown
    assert "every parameter is split into 1 shard; 2 copies of the model" in shown


def test_a_training_that_cannot_be_rehearsed_says_what_shows_the_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(model: Any, batch: Any) -> Any:
        raise KeyError("labels")

    example = dataclasses.replace(RECIPES["mnist"].example(), loss=loss)
    monkeypatch.setattr("shardwise.app.recipes.mnist.example", lambda config: example)
    with pytest.raises(UserError, match=r"(?s)--dry-run: .*labels.*`shardwise inspect` shows"):
        TrainingJob(RECIPES["mnist"]).show_dry_run(TWO)
