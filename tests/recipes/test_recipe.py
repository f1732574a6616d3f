"""The recipes by name, and what of them is imported when."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shardwise.app.recipes.catalog import RECIPES
from shardwise.app.recipes.core.recipe import Recipe
from shardwise.insight.schema.option import OptionError, as_json, flatten


def leaves(values: dict[str, object]) -> int:
    """The number of settings, nested ones included."""
    return sum(leaves(each) if isinstance(each, dict) else 1 for each in values.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_found_by_its_own_name_and_has_a_module(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.name == name
    assert importlib.util.find_spec(recipe.module) is not None


@pytest.mark.parametrize("name", RECIPES)
def test_the_defaults_of_a_recipe_are_a_training(name: str) -> None:
    train = RECIPES[name].config.train
    train.check_values()
    assert train.steps is not None or train.epochs is not None, "it ends"
    assert train.output.out.name == name


def test_recipes_have_folders_of_their_own() -> None:
    folders = {recipe.config.train.output.out for recipe in RECIPES.values()}
    assert len(folders) == len(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_innermost_names_lose_no_setting(name: str) -> None:
    """Runs and hosts are compared by these names: one of two alike would hide the other."""
    settings = as_json(RECIPES[name].config)
    assert len(flatten(settings)) == leaves(settings)


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].config_for])
def test_defaults_go_with_a_model_that_exists(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.config_for is not None
    with pytest.raises(OptionError, match="--model: found no-such-model, expected "):
        recipe.config_for("no-such-model").settings()  # type: ignore[attr-defined]


def test_what_builds_a_task_is_imported_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line lists all recipes; torch and transformers would take it seconds."""
    config = RECIPES["mnist"].config
    recipe = Recipe(name="toy", config=config, module="toy_recipe")
    with pytest.raises(ModuleNotFoundError, match="toy_recipe"):
        recipe.assemble()
    module = SimpleNamespace(assemble=object(), blueprint=lambda config: ("blueprint", config))
    monkeypatch.setitem(sys.modules, "toy_recipe", module)  # type: ignore[arg-type]
    assert recipe.assemble() is module.assemble
    assert recipe.blueprint(config) == ("blueprint", config)


def test_only_a_training_with_adapters_needs_peft() -> None:
    code = "import sys, shardwise.app.recipes.lm; sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
