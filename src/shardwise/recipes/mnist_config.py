"""What ``shardwise train mnist`` is asked to do, and whether that can be done. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.launch.world import World
from shardwise.recipes.begin import check_extras
from shardwise.recipes.config import (
    OptionError,
    TrainConfig,
    as_json,
    check_train,
    resolve_sharding,
)
from shardwise.recipes.idx import IdxSet, load_mnist
from shardwise.recipes.rundir import RunDir
from shardwise.recipes.span import Span


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
