"""The recipes by name, and what of them is imported when."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.vision.config import MnistConfig, VitConfig
from shardwise.insight.schema.option import OptionError, as_json, flatten
from tests.recipes.small import RECIPES


def leaves(values: dict[str, object]) -> int:
    """The number of settings, nested ones included."""
    return sum(leaves(each) if isinstance(each, dict) else 1 for each in values.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_found_by_its_own_name_and_has_a_module(name: str) -> None:
    assert RECIPES[name].recipe == name
    assert importlib.util.find_spec(f"shardwise.app.recipes.{RECIPES[name].module}") is not None


@pytest.mark.parametrize("name", RECIPES)
def test_the_defaults_of_a_recipe_are_a_training(name: str) -> None:
    train = RECIPES[name].train
    train.check_values()
    assert train.steps is not None or train.epochs is not None, "it ends"
    assert train.output.out.name == name


def test_recipes_have_folders_of_their_own() -> None:
    folders = {config.train.output.out for config in RECIPES.values()}
    assert len(folders) == len(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_innermost_names_lose_no_setting(name: str) -> None:
    """Runs and hosts are compared by these names: one of two alike would hide the other."""
    settings = as_json(RECIPES[name])
    assert len(flatten(settings)) == leaves(settings)


@pytest.mark.parametrize("config", [LmConfig, VitConfig])
def test_defaults_go_with_a_model_that_exists(config: type[LmConfig] | type[VitConfig]) -> None:
    with pytest.raises(OptionError, match="--model: found no-such-model, expected "):
        config.for_model("no-such-model").settings()


def test_what_builds_a_task_is_imported_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line lists all recipes; torch and transformers would take it seconds."""
    config = RECIPES["mnist"]
    monkeypatch.setattr(MnistConfig, "module", "toy")
    with pytest.raises(ModuleNotFoundError, match="toy"):
        config.assemble()
    module: Any = SimpleNamespace(assemble=object(), blueprint=lambda given: ("blueprint", given))
    monkeypatch.setitem(sys.modules, "shardwise.app.recipes.toy", module)
    assert config.assemble() is module.assemble
    assert config.blueprint() == ("blueprint", config)
