"""What ``shardwise train imagenet`` is asked to do, and whether that can be done. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.launch.world import World
from shardwise.recipes.config import require
from shardwise.recipes.picture_config import PictureConfig, PictureInputs
from shardwise.recipes.presets import find_settings
from shardwise.recipes.resnets import RESNETS


@dataclass(frozen=True, kw_only=True)
class ImagenetConfig(PictureConfig):
    """A training of a residual net on pictures in folders.

    Attributes:
        warmup_epochs: over which the learning rate rises.
        drop_epochs: after as many it drops, again and again; 0: never.
        drop_factor: by which it drops.
    """

    model: str = "resnet50"
    warmup_epochs: float = 5.0
    drop_epochs: int = 30
    drop_factor: float = 10.0

    def lr(self, epoch: float) -> float:
        """The learning rate after so many epochs: a rise to the peak, and then steps down."""
        peak = self.train.optimizer.lr
        if epoch < self.warmup_epochs:
            return peak * epoch / self.warmup_epochs
        drops = int(epoch // self.drop_epochs) if self.drop_epochs else 0
        return float(peak / self.drop_factor**drops)

    def check(self, world: World) -> ImagenetInputs:
        """Check everything that can be checked without torch, and find the pictures.

        Raises:
            UserError: one line saying what is wrong.
        """
        require(self.image_size >= 32, "--image-size", self.image_size, "32 or more")
        require(
            0 <= self.warmup_epochs < math.inf, "--warmup-epochs", self.warmup_epochs, "0 or more"
        )
        require(self.drop_epochs >= 0, "--lr-drop-epochs", self.drop_epochs, "0 or more")
        require(
            0 < self.drop_factor < math.inf,
            "--lr-drop-factor",
            self.drop_factor,
            "a number above 0",
        )
        settings = find_settings(self.model, RESNETS)
        return ImagenetInputs(self, settings, self.find(world))


@dataclass(frozen=True)
class ImagenetInputs(PictureInputs):
    """What a configuration refers to."""

    recipe = "imagenet"

    config: ImagenetConfig
