"""What a field says about its option, and what the options of all recipes have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwise.insight.schema.option import (
    DILOCO,
    HOSTS,
    MODEL,
    OPTION,
    OUTPUT,
    SAMPLE,
    SHARDING,
    TRAINING,
    Option,
    option,
    option_name,
)
from shardwise.insight.schema.training import DilocoConfig
from tests.recipes.small import RECIPES

ALL = {**RECIPES, "lm with DiLoCo": RECIPES["lm"].with_train(diloco=DilocoConfig())}


def options(config: Any) -> Iterator[tuple[str, Option]]:
    """Every field that is an option, by its name; those of nested configurations too."""
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if OPTION in each.metadata:
            yield each.name, each.metadata[OPTION]
        elif dataclasses.is_dataclass(value):
            yield from options(value)


def test_metadata_hold_an_option_and_leave_the_default_alone() -> None:
    @dataclass(frozen=True)
    class Config:
        width: int = field(default=3, metadata=option("Width.", MODEL))

    (width,) = dataclasses.fields(Config)
    assert Config().width == 3
    assert width.metadata[OPTION] == Option(help="Width.", panel=MODEL)


def test_a_setting_that_no_option_has_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        option("Width.", MODEL, colour="red")


def test_an_option_is_called_as_its_field_with_hyphens() -> None:
    assert option_name("out") == "--out"
    assert option_name("checkpoint_every") == "--checkpoint-every"


@pytest.mark.parametrize("recipe", ALL)
def test_every_option_has_a_sentence_for_help_and_a_panel_that_exists(recipe: str) -> None:
    panels = {None, HOSTS, MODEL, TRAINING, SHARDING, DILOCO, OUTPUT, SAMPLE}
    for name, each in options(ALL[recipe]):
        assert each.help.endswith("."), name
        assert each.panel in panels, name


@pytest.mark.parametrize("recipe", ALL)
def test_no_two_settings_of_a_recipe_share_a_name(recipe: str) -> None:
    """Runs are compared by the innermost names of their settings: a name means one thing."""
    names = [name for name, _ in options(ALL[recipe])]
    assert len(names) == len(set(names))
    shown = [each.name or option_name(name) for name, each in options(ALL[recipe])]
    assert len(set(shown)) == len(shown)
