"""What ``shardwise train vit`` is asked to do, and whether that can be done. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.launch.world import World
from shardwise.recipes.begin import check_extras
from shardwise.recipes.config import OptionError, check_train, require, resolve_sharding
from shardwise.recipes.picture_config import PictureConfig, PictureInputs
from shardwise.recipes.presets import find_settings
from shardwise.recipes.vit_presets import VIT_PRESETS, VitPreset

_FOR_CONFIG_FILES = VIT_PRESETS["vit-base"]


def defaults_for(model: str) -> VitPreset:
    """The preset whose batch size and learning rate go with ``--model``."""
    return VIT_PRESETS.get(model, _FOR_CONFIG_FILES)


@dataclass(frozen=True, kw_only=True)
class VitConfig(PictureConfig):
    """A training of a Vision Transformer on pictures in folders.

    Attributes:
        model: a preset's name or the path of a ``config.json``.
        image_size: height and width that the model sees, whatever the model says.
        patch_size: height and width of a patch; None: as the model says.
        layers: number of blocks; None: as the model says.
        nested: every block is a group of its own; else the model is one group.
    """

    model: str = "vit-tiny"
    patch_size: int | None = None
    layers: int | None = None
    nested: bool = True

    def settings(self) -> dict[str, Any]:
        """The settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no such model, or sizes that do not go together.
        """
        presets = {name: preset.settings() for name, preset in VIT_PRESETS.items()}
        settings = dict(find_settings(self.model, presets))
        kind = settings["model_type"]
        require(kind == "vit", "--model", f"{self.model} of type {kind}", "one of type vit")
        asked = {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "num_hidden_layers": self.layers,
        }
        settings |= {name: value for name, value in asked.items() if value is not None}
        patch = settings.get("patch_size", 16)
        require(isinstance(patch, int) and patch > 0, "--patch-size", patch, "a number from 1")
        fits = self.image_size > 0 and self.image_size % patch == 0
        require(fits, "--image-size", self.image_size, f"a multiple of {patch}, a patch's size")
        layers = settings.get("num_hidden_layers", 12)
        fits = isinstance(layers, int) and layers >= 1
        require(fits, "--layers", layers, "a number from 1")
        return settings

    def check(self, world: World) -> VitInputs:
        """Check everything that can be checked without torch, and find the pictures.

        Raises:
            UserError: one line saying what is wrong.
        """
        return VitInputs(self, self.settings(), self.find(world))

    def check_dry_run(self, world_size: int) -> None:
        """Check what it takes to tell what every rank would hold: no data, no folder.

        Raises:
            UserError: one line saying what is wrong.
        """
        require(world_size >= 1, "--world-size", world_size, "1 or more")
        self.settings()
        check_train(self.train)
        resolve_sharding(self.train.sharding, world_size)
        check_extras(["transformers"], tensorboard=False)


def image_size_of(model: str) -> int:
    """Height and width of the pictures that go with ``--model``.

    Raises:
        OptionError: no such model, or one for pictures that are not square.
    """
    settings = find_settings(model, {name: each.settings() for name, each in VIT_PRESETS.items()})
    size = settings.get("image_size", 224)
    if not isinstance(size, int):
        raise OptionError("--model", f"image_size {size} in {model}", "one number: a square")
    return size


@dataclass(frozen=True)
class VitInputs(PictureInputs):
    """What a configuration refers to."""

    recipe = "vit"
    model_options = {"num_hidden_layers": "--layers", "patch_size": "--patch-size"}  # noqa: RUF012

    config: VitConfig
