"""What every training on pictures in folders is asked to do. No torch here.

What ``shardwise train imagenet`` is asked to do, and whether that can be done. No torch here.

What ``shardwise train vit`` is asked to do, and whether that can be done. No torch here.

What ``shardwise train mnist`` is asked to do, and whether that can be done. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from shardwise.launch.world import World
from shardwise.recipes.core.begin import check_extras
from shardwise.recipes.core.config import (
    OptionError,
    TrainConfig,
    as_json,
    check_train,
    find_settings,
    require,
    resolve_sharding,
)
from shardwise.recipes.core.position import Span
from shardwise.recipes.core.rundir import RunDir, check_same, check_same_model
from shardwise.recipes.vision.files import IdxSet, ImageFolder, find_pictures, load_mnist
from shardwise.recipes.vision.presets import RESNETS, VIT_PRESETS, VitPreset

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


@dataclass(frozen=True, kw_only=True)
class MnistConfig:
    """A training on MNIST.

    Attributes:
        data_dir: folder with MNIST's four files.
        nested: shard each convolution block by itself, and not only the net as a whole.
        train: everything that is not particular to MNIST.
    """

    data_dir: Path
    nested: bool = False
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

    def check(self, world: World) -> MnistInputs:
        """Check everything that can be checked without torch, and read the data.

        Raises:
            UserError: one line saying what is wrong.
        """
        check_train(self.train)
        self.check_world(world)
        check_extras(["safetensors", "matplotlib"], tensorboard=self.train.output.tensorboard)
        return MnistInputs(self, *load_mnist(self.data_dir))


@dataclass(frozen=True)
class MnistInputs:
    """What a configuration refers to.

    Attributes:
        config: the configuration.
        training: pictures to learn from.
        test: pictures to be judged by.
    """

    recipe = "mnist"

    config: MnistConfig
    training: IdxSet
    test: IdxSet

    @property
    def train(self) -> TrainConfig:
        """How to train."""
        return self.config.train

    @property
    def span(self) -> Span:
        """How long."""
        return Span.of(self.train, len(self.training))

    def facts(self) -> dict[str, Any]:
        """For ``run.json``: what is the same whenever the run goes on."""
        return {
            "config": as_json(self.config),
            "model": {"name": "convnet"},
            "data": {
                "name": str(self.config.data_dir),
                "training_pictures": len(self.training),
                "test_pictures": len(self.test),
                "fingerprint": f"{self.training.fingerprint()}-{self.test.fingerprint()}",
            },
        }

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Check that the data are those of the run that is resumed."""
        data = before.get("data", {})
        if data.get("fingerprint") != self.facts()["data"]["fingerprint"]:
            raise OptionError(
                "--data-dir",
                f"{self.config.data_dir}, other pictures",
                f"those of {data.get('name')}, as the run began that --resume goes on",
            )
