"""What ``shardwise train imagenet`` is asked to do, and whether that can be done. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.launch.world import World
from shardwise.recipes.begin import check_extras
from shardwise.recipes.config import (
    OptionError,
    TrainConfig,
    as_json,
    check_train,
    require,
    resolve_sharding,
)
from shardwise.recipes.imagefolder import ImageFolder, find_pictures
from shardwise.recipes.presets import find_settings
from shardwise.recipes.resnets import RESNETS
from shardwise.recipes.rundir import RunDir, check_same
from shardwise.recipes.span import Span

if TYPE_CHECKING:
    from shardwise.recipes.task import Place, Task

# --fake-data stands in for ImageNet, with few pictures to be judged by: nobody waits for noise.
FAKE_TRAINING, FAKE_VALIDATION, FAKE_CLASSES = 1_281_167, 256, 1000


@dataclass(frozen=True, kw_only=True)
class ImagenetConfig:
    """A training on pictures in folders.

    Attributes:
        data_dir: folder with ``train`` and ``val``; None with ``fake_data``.
        fake_data: train on noise, to measure speed.
        model: a preset's name or the path of a ``config.json``.
        image_size: height and width that the model sees.
        warmup_epochs: over which the learning rate rises.
        drop_epochs: after as many it drops, again and again; 0: never.
        drop_factor: by which it drops.
        threads: that decode pictures, per rank.
        train: everything that is not particular to this recipe.
    """

    data_dir: Path | None
    fake_data: bool = False
    model: str = "resnet50"
    image_size: int = 224
    warmup_epochs: float = 5.0
    drop_epochs: int = 30
    drop_factor: float = 10.0
    threads: int = 4
    train: TrainConfig

    @property
    def files(self) -> RunDir:
        """The folder of the run."""
        return RunDir(self.train.output.out)

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
        check_train(self.train)
        require(self.image_size >= 32, "--image-size", self.image_size, "32 or more")
        require(self.threads >= 1, "--workers", self.threads, "1 or more")
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
        resolve_sharding(self.train.sharding, world.size, world.hosts)
        settings = find_settings(self.model, RESNETS)
        folders = self._folders()
        check_extras(
            ["transformers", "matplotlib", "PIL"], tensorboard=self.train.output.tensorboard
        )
        return ImagenetInputs(self, settings, folders)

    def _folders(self) -> tuple[ImageFolder, ImageFolder] | None:
        if self.fake_data:
            require(self.data_dir is None, "--fake-data", "--data-dir too", "one of the two")
            return None
        if self.data_dir is None:
            raise OptionError("--data-dir", "none", "a folder with train and val, or --fake-data")
        return find_pictures(self.data_dir)


@dataclass(frozen=True)
class ImagenetInputs:
    """What a configuration refers to.

    Attributes:
        config: the configuration.
        settings: of the model, as in a ``config.json``.
        folders: pictures to learn from and to be judged by; None for fake data.
    """

    recipe = "imagenet"

    config: ImagenetConfig
    settings: dict[str, Any]
    folders: tuple[ImageFolder, ImageFolder] | None

    @property
    def train(self) -> TrainConfig:
        """How to train."""
        return self.config.train

    @property
    def span(self) -> Span:
        """How long."""
        return Span.of(self.train, len(self.folders[0]) if self.folders else FAKE_TRAINING)

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        if self.folders:
            return list(self.folders[0].classes)
        return [str(number) for number in range(FAKE_CLASSES)]

    def facts(self) -> dict[str, Any]:
        """For ``run.json``: what is the same whenever the run goes on."""
        data: dict[str, Any] = {"name": "fake pictures", "fingerprint": "fake"}
        if self.folders:
            training, validation = self.folders
            data = {
                "name": str(self.config.data_dir),
                "training_pictures": len(training),
                "validation_pictures": len(validation),
                "fingerprint": f"{training.fingerprint()}-{validation.fingerprint()}",
            }
        return {
            "config": as_json(self.config),
            "model": {"name": self.config.model, "settings": self.settings},
            "data": {**data, "classes": len(self.classes)},
        }

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Check that model and data are those of the run that is resumed."""
        now = self.facts()
        check_same(before.get("config", {}), now["config"], {"image_size": "--image-size"})
        model, data = before.get("model", {}), before.get("data", {})
        if model.get("settings") != self.settings:
            expected = f"{model.get('name')} as it was when the run began that --resume goes on"
            raise OptionError("--model", f"{self.config.model}, another model", expected)
        if data.get("fingerprint") != now["data"]["fingerprint"]:
            found = f"{now['data']['name']}, other pictures"
            expected = f"those of {data.get('name')}, as the run began that --resume goes on"
            raise OptionError("--data-dir", found, expected)

    def assemble(self, place: Place) -> Task:
        """Build everything on one rank."""
        from shardwise.recipes.imagenet import assemble  # imports torch and transformers

        return assemble(self, place)
