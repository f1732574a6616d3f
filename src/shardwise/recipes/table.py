"""All recipes by name. No torch here: what builds a task is imported when it is needed."""

from __future__ import annotations

from shardwise.recipes.core.recipe import Recipe
from shardwise.recipes.text.config import LmConfig
from shardwise.recipes.vision.config import ImagenetConfig, MnistConfig, VitConfig

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="lm",
            config=LmConfig.for_model("llama-tiny"),
            config_for=LmConfig.for_model,
            module="shardwise.recipes.lm",
        ),
        Recipe(name="mnist", config=MnistConfig(), module="shardwise.recipes.mnist"),
        Recipe(name="imagenet", config=ImagenetConfig(), module="shardwise.recipes.imagenet"),
        Recipe(
            name="vit",
            config=VitConfig.for_model("vit-tiny"),
            config_for=VitConfig.for_model,
            module="shardwise.recipes.vit",
        ),
    )
}
