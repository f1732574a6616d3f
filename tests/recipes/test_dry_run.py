"""``--dry-run`` says what ranks hold, for every recipe, and starts and writes nothing."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.main import app
from shardwise.recipes.catalog import RECIPES
from shardwise.recipes.core.config import (
    AdamWConfig,
    DilocoConfig,
    OutputConfig,
    Precision,
    SgdConfig,
    ShardingConfig,
    TrainConfig,
)
from shardwise.recipes.core.dry_run import AtRest, Outlook


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_shows_what_ranks_would_hold(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    recipe: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"shardwise train {recipe} --dry-run --world-size 3"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        app()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert "over dp_shard=3: every parameter is split into 3 shards" in shown
    found = re.search(r"([\d,]+) parameters in", shown)
    assert found is not None
    blueprint = RECIPES[recipe].blueprint(RECIPES[recipe].config)
    expected = sum(parameter.numel() for parameter in blueprint.model.parameters())
    assert int(found[1].replace(",", "")) == expected
    assert all(parameter.is_meta for parameter in blueprint.model.parameters())
    assert not list(tmp_path.iterdir()), "nothing was written"


def config(optimizer: Any, **changes: Any) -> TrainConfig:
    return TrainConfig(
        steps=1, batch_size=1, optimizer=optimizer, output=OutputConfig(out=Path("out")), **changes
    )


@pytest.mark.parametrize(
    ("train", "copies", "outer"),
    [
        (config(AdamWConfig(lr=1.0)), 4, 0),
        (config(SgdConfig(lr=1.0)), 3, 0),
        (config(SgdConfig(lr=1.0, momentum=0.0)), 2, 0),
        (config(AdamWConfig(lr=1.0), diloco=DilocoConfig()), 4, 2),
        (config(AdamWConfig(lr=1.0), diloco=DilocoConfig(error_feedback=True)), 4, 3),
    ],
)
def test_what_is_kept_between_steps_follows_from_the_optimizer(
    train: TrainConfig, copies: int, outer: int
) -> None:
    kept = AtRest.of(train)
    assert (kept.copies, kept.outer) == (copies, outer)


def test_bytes_at_rest_count_every_copy() -> None:
    recipe = RECIPES["mnist"]
    train = recipe.config.train
    blueprint = recipe.blueprint(recipe.config)
    outlook = Outlook.of(blueprint, train, 2)
    numel = sum(parameter.numel() for parameter in blueprint.model.parameters())
    assert outlook.at_rest(0) + outlook.at_rest(1) == numel * 4 * 4
    sgd = dataclasses.replace(train, optimizer=SgdConfig(lr=1.0))
    outlook = Outlook.of(blueprint, sgd, 2)
    assert outlook.at_rest(0) + outlook.at_rest(1) == numel * 4 * 3


def test_frozen_parameters_have_no_gradients_and_no_optimizer_state() -> None:
    recipe = RECIPES["mnist"]
    train = recipe.config.train
    blueprint = recipe.blueprint(recipe.config)
    full = Outlook.of(blueprint, train, 2).gradients
    parameters = list(blueprint.model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    parameters[0].requires_grad_(False)
    trained = numel - parameters[0].numel()
    outlook = Outlook.of(blueprint, train, 2)
    found = outlook.at_rest(0) + outlook.at_rest(1)
    assert found == pytest.approx((numel + 3 * trained) * 4, abs=2)
    assert outlook.gradients == pytest.approx(full * trained / numel, abs=1)


def test_shards_in_bf16_take_half_the_memory_and_the_outer_state_of_diloco_does_not() -> None:
    recipe = RECIPES["lm"]
    bf16 = ShardingConfig(shard_dtype=Precision.BF16)
    halved = dataclasses.replace(recipe.config.train, sharding=bf16)
    apart = dataclasses.replace(halved, diloco=DilocoConfig())
    full, half, diloco = (
        Outlook.of(recipe.blueprint(recipe.config), train, 2).at_rest(0)
        for train in (recipe.config.train, halved, apart)
    )
    assert half * 2 == full
    assert diloco == half + full // 4 * 2
