"""What a field says about its option, and what the options of all recipes have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwise.insight.schema.option import (
    DILOCO,
    GROUP,
    HOSTS,
    MODEL,
    OPTION,
    OUTPUT,
    SAMPLE,
    SHARDING,
    TRAINING,
    Group,
    Option,
    option,
    option_name,
)
from shardwise.insight.schema.training import DilocoConfig, TrainConfig
from tests.recipes.small import RECIPES


def options(config: Any) -> Iterator[tuple[str, Option]]:
    """Every field that is an option, by its name; those of nested configurations too."""
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if OPTION in each.metadata:
            yield each.name, each.metadata[OPTION]
        elif GROUP in each.metadata:
            yield from options(each.metadata[GROUP].default)
        elif dataclasses.is_dataclass(value):
            yield from options(value)


def test_metadata_hold_an_option_and_leave_the_default_alone() -> None:
    @dataclass(frozen=True)
    class Config:
        width: int = field(default=3, metadata=option("Width.", MODEL, former=("--columns",)))

    (width,) = dataclasses.fields(Config)
    assert Config().width == 3
    assert width.metadata[OPTION] == Option(help="Width.", panel=MODEL, former=("--columns",))


def test_a_setting_that_no_option_has_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        option("Width.", MODEL, colour="red")


def test_an_option_is_called_as_its_field_with_hyphens() -> None:
    assert option_name("out") == "--out"
    assert option_name("checkpoint_every") == "--checkpoint-every"


def test_settings_of_diloco_go_with_its_strategy_alone() -> None:
    (diloco,) = (each for each in dataclasses.fields(TrainConfig) if each.name == "diloco")
    group: Group = diloco.metadata[GROUP]
    assert (group.default, group.setting, group.value.value) == (
        DilocoConfig(), "strategy", "diloco",
    )  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_option_has_a_sentence_for_help_and_a_panel_that_exists(recipe: str) -> None:
    panels = {None, HOSTS, MODEL, TRAINING, SHARDING, DILOCO, OUTPUT, SAMPLE}
    for name, each in options(RECIPES[recipe]):
        assert each.help.endswith("."), name
        assert each.panel in panels, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_two_settings_of_a_recipe_share_a_name(recipe: str) -> None:
    """Runs are compared by the innermost names of their settings: a name means one thing."""
    names = [name for name, _ in options(RECIPES[recipe])]
    assert len(names) == len(set(names))
    shown = [each.name or option_name(name) for name, each in options(RECIPES[recipe])]
    former = [name for _, each in options(RECIPES[recipe]) for name in each.former]
    assert len(set(shown + former)) == len(shown + former), "an old name now means something else"
