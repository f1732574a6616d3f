"""The configurations of ``shardwise train mnist``, ``imagenet`` and ``vit``, and their models.

No torch here: the command line asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeAlias, TypeVar

from shardwise.app.recipes.core.installed import check_extras
from shardwise.app.recipes.core.position import TrainingSpan
from shardwise.app.recipes.core.recipe import Inputs, RecipeConfig
from shardwise.app.recipes.vision.files import IdxSet, ImageFolder, find_images, load_mnist
from shardwise.elastic.world import World
from shardwise.insight.planning.presets import RESNETS, VIT_PRESETS, find_settings
from shardwise.insight.schema.option import (
    BY_MODEL,
    MODEL,
    SHARDING,
    TRAINING,
    Bounds,
    Count,
    Natural,
    NotNegative,
    OnResume,
    OptionError,
    Positive,
    as_json,
    model_option,
    naming,
    require,
    setting,
)
from shardwise.insight.schema.training import OptimizerConfig, OutputConfig, SgdConfig, TrainConfig

if TYPE_CHECKING:
    from shardwise.insight.blueprint import Blueprint

# --fake-data stands in for ImageNet, with few images to evaluate on: noise is not worth a wait.
FAKE_TRAINING, FAKE_VALIDATION, FAKE_CLASSES = 1_281_167, 256, 1000

_NOT_SQUARE = 0  # as the default of an image size: the model has no single one

ImageFiles: TypeAlias = tuple[ImageFolder, ImageFolder] | tuple[IdxSet, IdxSet]


@dataclass(frozen=True, kw_only=True)
class VisionConfig(RecipeConfig):
    """What the configurations of all trainings on images have in common."""

    train: TrainConfig
    eval_batch_size: Count | None = setting(
        None, "Images per rank at a time in evaluations.", TRAINING, shown="that of --batch-size"
    )
    data_dir: Path | None

    @property
    def shares(self) -> str:
        """What several hosts need in the folder of the run, for messages."""
        return "the file of weights"

    def blueprint_for(self, classes: int) -> Blueprint:
        """Return the same as :meth:`blueprint`, of a model that tells this many classes apart."""
        del classes
        return self.blueprint()


C = TypeVar("C", bound=VisionConfig, covariant=True)


@dataclass(frozen=True)
class VisionInputs(Inputs, Generic[C]):
    """A checked configuration, and what it refers to.

    Attributes:
        config: the configuration.
        model: what the model is called.
        images: to train on and to evaluate on; None for fake data.
        settings: of the model, as in a ``config.json``; empty: it is not of ``transformers``.
    """

    config: C
    model: str
    images: ImageFiles | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def span(self) -> TrainingSpan:
        """How long the training is."""
        return TrainingSpan.of(self.train, len(self.images[0]) if self.images else FAKE_TRAINING)

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return [*self.images[0].classes] if self.images else [*map(str, range(FAKE_CLASSES))]

    def blueprint(self) -> Blueprint:
        """Return the model, without memory, as it is trained on these images."""
        return self.config.blueprint_for(len(self.classes))

    def facts(self) -> dict[str, Any]:
        """Return config, model and data for ``run.json``: what is the same in every session."""
        data: dict[str, Any] = {"name": "fake images", "fingerprint": "fake"}
        if self.images:
            training, validation = self.images
            data = {
                "name": str(self.config.data_dir),
                "training_images": len(training),
                "validation_images": len(validation),
                "fingerprint": f"{training.fingerprint()}-{validation.fingerprint()}",
            }
        return {
            "config": as_json(self.config),
            "model": {"name": self.model, **({"settings": self.settings} if self.settings else {})},
            "data": {**data, "classes": len(self.classes)},
        }

    def of_data(self, data: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the option that names the data, what they are now, and what others are called."""
        found = f"{self.facts()['data']['name']}, other images"
        return "--data-dir", found, f"those of {data.get('name')}"


# -- MNIST -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MnistConfig(VisionConfig):
    """A training of a convolutional network on MNIST."""

    module = recipe = "mnist"

    data_dir: Path | None = setting(
        None,
        "Folder with MNIST's four IDX files.",
        MODEL,
        metavar="PATH",
        on_resume=OnResume.DATA,
    )
    train: TrainConfig = field(
        default=TrainConfig(
            epochs=2,
            batch_size=64,
            optimizer=OptimizerConfig(
                lr=5e-3, warmup=50, beta2=0.999, weight_decay=0.01, clip_grad=0.0
            ),
            output=OutputConfig(out=Path("runs/mnist"), checkpoint_every=200, eval_every=1),
        )
    )
    nested: bool = setting(
        False,
        "Shard each convolution block by itself, then the rest.",
        SHARDING,
        name="--nested-fsdp/--no-nested-fsdp",
    )

    def check(self, world: World) -> VisionInputs[Self]:
        """Check everything that can be checked without torch, and read the data.

        Raises:
            UserError: one line that says what is wrong.
        """
        self.check_values()
        self.check_world(world)
        check_extras(["safetensors", "PIL"], self.train.output.logs)
        if self.data_dir is None:
            raise OptionError("--data-dir", "none", "a folder with MNIST's four files")
        return VisionInputs(self, "convnet", load_mnist(self.data_dir))


# -- images in folders -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageFolderConfig(VisionConfig):
    """A training of a model of ``transformers`` on images in folders."""

    module = "images"

    data_dir: Path | None = setting(
        None,
        "Folder with train/CLASS/ and val/CLASS/.",
        MODEL,
        metavar="PATH",
        on_resume=OnResume.DATA,
    )
    fake_data: bool = setting(
        False, "Train on noise, to measure speed.", MODEL, on_resume=OnResume.DATA
    )
    model: str
    image_size: Annotated[int, Bounds(most=1 << 16)] = setting(
        224, "Height and width of the model's input, in pixels.", MODEL, on_resume=OnResume.FIXED
    )
    threads: Annotated[int, Bounds(least=1, most=1024)] = setting(
        4, "Threads that decode images, per rank.", MODEL, name="--workers"
    )

    def check_dry_run(self, world: World) -> None:
        """Check what ``--dry-run`` needs: no data, no folder.

        Raises:
            UserError: one line that says what is wrong.
        """
        super().check_dry_run(world)
        self.settings()
        check_extras(["transformers"])

    def blueprint_for(self, classes: int) -> Blueprint:
        """Return the model, without memory, for this many classes."""
        return self.blueprint(classes=classes)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no model has this name, or an option does not go with it.
        """
        raise NotImplementedError

    def check(self, world: World) -> VisionInputs[Self]:
        """Check everything that can be checked without torch, and list the images.

        Raises:
            UserError: one line that says what is wrong.
        """
        settings = self.settings()
        self.check_values()
        self.check_world(world)
        images: ImageFiles | None = None
        if self.fake_data:
            require(self.data_dir is None, "--fake-data", "--data-dir too", "one of the two")
        elif self.data_dir is None:
            raise OptionError("--data-dir", "none", "a folder with train and val, or --fake-data")
        else:
            images = find_images(self.data_dir)
        check_extras(["transformers", "PIL"], self.train.output.logs)
        return VisionInputs(self, self.model, images, settings)


# -- residual networks -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImagenetConfig(ImageFolderConfig):
    """A training of a residual network; the defaults are ImageNet's published schedule."""

    recipe = "imagenet"

    model: str = field(default="resnet50", metadata=model_option(RESNETS))
    train: TrainConfig = field(
        default=TrainConfig(
            epochs=100,
            batch_size=128,
            optimizer=SgdConfig(lr=0.4),
            output=OutputConfig(out=Path("runs/imagenet"), checkpoint_every=1000, eval_every=1),
        )
    )
    warmup_epochs: NotNegative = setting(
        5.0, "Epochs of linear warmup of the learning rate.", TRAINING
    )
    drop_epochs: Natural = setting(
        30,
        "Epochs from one drop of the learning rate to the next; 0: no drops.",
        TRAINING,
        name="--lr-drop-epochs",
    )
    drop_factor: Positive = setting(
        10.0, "Divides the learning rate then.", TRAINING, name="--lr-drop-factor"
    )

    def lr(self, epoch: float) -> float:
        """Return the learning rate after a number of epochs: linear warmup, then steps down."""
        peak = self.train.optimizer.lr
        if epoch < self.warmup_epochs:
            return peak * epoch / self.warmup_epochs
        drops = int(epoch // self.drop_epochs) if self.drop_epochs else 0
        return float(peak / self.drop_factor**drops)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no model has this name, or a number is out of range.
        """
        require(self.image_size >= 32, "--image-size", self.image_size, "32 or more")
        return naming("--model")(find_settings)(self.model, RESNETS)


# -- Vision Transformers ---------------------------------------------------------------------------


_BATCH_SIZE, _BATCH_SIZES = 32, {"vit-10b": 8}  # images of a rank


@dataclass(frozen=True, kw_only=True)
class VitConfig(ImageFolderConfig):
    """A training of a Vision Transformer."""

    recipe = "vit"
    model_options = {"num_hidden_layers": "--layers", "patch_size": "--patch-size"}  # noqa: RUF012

    model: str = field(default="vit-tiny", metadata=model_option(VIT_PRESETS))
    layers: Annotated[int, Bounds(least=1, most=10_000)] | None = setting(
        None, "Number of blocks.", MODEL, shown=BY_MODEL, on_resume=OnResume.FIXED
    )
    image_size: Annotated[int, Bounds(most=1 << 16)] = setting(
        224,
        "Height and width of the model's input, in pixels.",
        MODEL,
        shown=BY_MODEL,
        on_resume=OnResume.FIXED,
    )
    patch_size: Count | None = setting(
        None,
        "Height and width of a patch, in pixels.",
        MODEL,
        shown=BY_MODEL,
        on_resume=OnResume.FIXED,
    )
    train: TrainConfig = field(
        default=TrainConfig(
            epochs=300,
            batch_size=_BATCH_SIZE,
            optimizer=OptimizerConfig(
                lr=1e-3, warmup=10_000, beta2=0.999, weight_decay=0.1, clip_grad=1.0
            ),
            output=OutputConfig(out=Path("runs/vit"), checkpoint_every=1000, eval_every=10),
        )
    )
    nested: bool = setting(
        True,
        "Shard the model as one group, not each block by itself.",
        SHARDING,
        name="--nested-fsdp/--no-nested-fsdp",
    )

    @classmethod
    def for_model(cls, model: str) -> VitConfig:
        """Return the configuration with the defaults that go with ``--model``.

        Raises:
            OptionError: no model has this name.
        """
        default = cls(model=model)
        size = naming("--model")(find_settings)(model, VIT_PRESETS).get("image_size", 224)
        if not isinstance(size, int):
            size = _NOT_SQUARE
        return replace(default, image_size=size).with_train(
            batch_size=_BATCH_SIZES.get(model, _BATCH_SIZE)
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the model, as in a ``config.json``.

        Raises:
            OptionError: no model has this name, or sizes do not go together.
        """
        settings = dict(naming("--model")(find_settings)(self.model, VIT_PRESETS))
        kind = settings["model_type"]
        require(kind == "vit", "--model", f"{self.model} of type {kind}", "one of type vit")
        if self.image_size == _NOT_SQUARE and not isinstance(settings.get("image_size", 224), int):
            found = f"{self.model}, whose images are not square"
            raise OptionError("--model", found, "square ones, or --image-size")
        asked = {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "num_hidden_layers": self.layers,
        }
        settings |= {name: value for name, value in asked.items() if value is not None}
        patch = settings.get("patch_size", 16)
        require(isinstance(patch, int) and patch > 0, "--patch-size", patch, "1 or more")
        fits = self.image_size > 0 and self.image_size % patch == 0
        require(fits, "--image-size", self.image_size, f"a multiple of {patch}, the patch size")
        layers = settings.get("num_hidden_layers", 12)
        require(isinstance(layers, int) and layers >= 1, "--layers", layers, "1 or more")
        return settings


#: Each training on images with all its defaults, by its name.
DEFAULTS: dict[str, RecipeConfig] = {
    "mnist": MnistConfig(),
    "imagenet": ImagenetConfig(),
    "vit": VitConfig.for_model("vit-tiny"),
}
