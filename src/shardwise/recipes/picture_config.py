"""What every training on pictures in folders is asked to do. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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
from shardwise.recipes.rundir import RunDir, check_same, check_same_model
from shardwise.recipes.span import Span

# --fake-data stands in for ImageNet, with few pictures to be judged by: nobody waits for noise.
FAKE_TRAINING, FAKE_VALIDATION, FAKE_CLASSES = 1_281_167, 256, 1000

Folders = tuple[ImageFolder, ImageFolder]


@dataclass(frozen=True, kw_only=True)
class PictureConfig:
    """A training on pictures in folders.

    Attributes:
        data_dir: folder with ``train`` and ``val``; None with ``fake_data``.
        fake_data: train on noise, to measure speed.
        model: a preset's name or the path of a ``config.json``.
        image_size: height and width that the model sees.
        threads: that decode pictures, per rank.
        train: everything that is not particular to pictures.
    """

    data_dir: Path | None
    fake_data: bool = False
    model: str
    image_size: int = 224
    threads: int = 4
    train: TrainConfig

    @property
    def files(self) -> RunDir:
        """The folder of the run."""
        return RunDir(self.train.output.out)

    def check_world(self, world: World) -> None:
        """Check what is asked for against the world alone.

        Raises:
            OptionError: it does not fit.
        """
        resolve_sharding(self.train.sharding, world.size, world.hosts)

    def find(self, world: World) -> Folders | None:
        """Check what all such trainings have in common, and find the pictures.

        Returns:
            Pictures to learn from and to be judged by; None for fake data.

        Raises:
            UserError: one line saying what is wrong.
        """
        check_train(self.train)
        require(self.threads >= 1, "--workers", self.threads, "1 or more")
        self.check_world(world)
        folders = self._folders()
        check_extras(
            ["transformers", "matplotlib", "PIL"], tensorboard=self.train.output.tensorboard
        )
        return folders

    def _folders(self) -> Folders | None:
        if self.fake_data:
            require(self.data_dir is None, "--fake-data", "--data-dir too", "one of the two")
            return None
        if self.data_dir is None:
            raise OptionError("--data-dir", "none", "a folder with train and val, or --fake-data")
        return find_pictures(self.data_dir)


@dataclass(frozen=True)
class PictureInputs:
    """What a configuration refers to.

    Attributes:
        config: the configuration.
        settings: of the model, as in a ``config.json``.
        folders: pictures to learn from and to be judged by; None for fake data.
    """

    #: Setting of the model -> option that changes it.
    model_options: ClassVar[Mapping[str, str]] = {}

    config: PictureConfig
    settings: dict[str, Any]
    folders: Folders | None

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
        data = before.get("data", {})
        # First, since the default of --image-size may go with the model.
        check_same_model(
            _but_size(before.get("model", {})), _but_size(now["model"]), self.model_options
        )
        check_same(before.get("config", {}), now["config"], {"image_size": "--image-size"})
        if data.get("fingerprint") != now["data"]["fingerprint"]:
            found = f"{now['data']['name']}, other pictures"
            expected = f"those of {data.get('name')}, as the run began that --resume goes on"
            raise OptionError("--data-dir", found, expected)


def _but_size(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model without the size of its pictures, which belongs to the configuration."""
    settings = dict(model.get("settings", {}))
    settings.pop("image_size", None)
    return {**model, "settings": settings}
