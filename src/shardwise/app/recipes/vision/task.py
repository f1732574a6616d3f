"""What all trainings on images have in common: batches, loss, evaluation, the files at the end.

Whatever is random is drawn from a number that belongs to the image and its epoch, so that every
rank of every world, and a resumed run, do the same to it.
"""

from __future__ import annotations

import enum
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import nn

from shardwise.app.recipes.core.batches import ReadAhead, Shuffled
from shardwise.app.recipes.core.build import (
    average_running_statistics,
    evaluating,
    learning_rate,
    program_of,
)
from shardwise.app.recipes.core.checkpointing import SaveError, on_rank_zero
from shardwise.app.recipes.core.position import Draw
from shardwise.app.recipes.core.recipe import Example, Schedule, Task, TrainContext
from shardwise.app.recipes.vision.config import (
    FAKE_TRAINING,
    FAKE_VALIDATION,
    ImageFolderConfig,
    VisionConfig,
    VisionInputs,
)
from shardwise.app.recipes.vision.files import ImageFolder
from shardwise.base.errors import CheckpointError, UserError
from shardwise.base.mixing import mix
from shardwise.checkpoint.disk.place import Place
from shardwise.checkpoint.tools.convert import consolidate
from shardwise.elastic.world import World
from shardwise.insight.blueprint import Blueprint
from shardwise.insight.program import Program
from shardwise.insight.schema.training import OptimizerConfig
from shardwise.transport.peers import Peers

# Of ImageNet's pixels, by channel, of values 0 to 1: what published models are trained with.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

AREA = (0.08, 1.0)  # of the image, that a random crop has
RATIO = (3 / 4, 4 / 3)  # of width to height
ATTEMPTS = 10  # at a crop that lies inside the image
CENTER = 224 / 256  # of the shorter side, that evaluation looks at

Box = tuple[float, float, float, float]


class Batch(NamedTuple):
    """Images, and their classes."""

    images: torch.Tensor
    classes: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return Batch(self.images.to(device), self.classes.to(device))


class Images(Protocol):
    """Images with their classes."""

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Read some of them to the CPU.

        Args:
            indices: which.
            keys: 64 bits for each, from which whatever is random is drawn.

        Returns:
            Images, float32 of shape (count, channels, height, width), normalized; and classes,
            int64 of shape (count,).
        """


def read_drawn(images: Images, draws: Sequence[Draw]) -> Batch:
    """Read images with the keys that belong to them and their epoch."""
    return images.read([d.index for d in draws], [mix(d.key ^ d.index) for d in draws])


class FakeImages:
    """One image of noise, as often as needed: to measure speed without a disk.

    Args:
        count: number of images.
        classes: number of classes; the image is of each in turn.
        size: height and width.
    """

    def __init__(self, count: int, classes: int, size: int) -> None:
        self._count = count
        self._classes = classes
        self._image = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return the number of images."""
        return self._count

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Return the image, with the classes that go with the indices."""
        del keys
        images = self._image.expand(len(indices), -1, -1, -1)
        return Batch(images, torch.tensor(indices) % self._classes)


class Augment(enum.Enum):
    """Which part of an image the model sees."""

    RANDOM_CROP = "random crop"  # and flipped at random, for training
    CENTER_CROP = "center crop"  # for evaluation


class FolderImages:
    """Images of an :class:`ImageFolder`, read when they are needed.

    Args:
        folder: where they are.
        size: height and width of the model's input.
        augment: which part of an image the model sees.
        threads: number of images that are decoded at the same time.
    """

    def __init__(self, folder: ImageFolder, size: int, augment: Augment, threads: int) -> None:
        self._folder = folder
        self._size = size
        self._augment = augment
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._folder)

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Read some of them; see :meth:`Images.read`.

        Raises:
            UserError: a file cannot be read as an image.
        """
        found = [self._folder.at(index) for index in indices]
        paths = [path for path, _ in found]
        pixels = np.stack(list(self._threads.map(self._decode, paths, keys)))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return Batch((images - mean) / std, torch.tensor([number for _, number in found]))

    def _decode(self, path: Path, key: int) -> np.ndarray:
        """Return one image as uint8 of shape (size, size, 3)."""
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise UserError(f"--data-dir: {path} cannot be read as an image: {error}") from None
        draw = random.Random(key)
        is_random = self._augment is Augment.RANDOM_CROP
        box = random_box(*image.size, draw) if is_random else center_box(*image.size)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box)
        if is_random and draw.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(image)


def random_box(width: int, height: int, draw: random.Random) -> Box:
    """Return a part of an image of random area, shape and place: left, upper, right, lower."""
    for _ in range(ATTEMPTS):
        area = width * height * draw.uniform(*AREA)
        ratio = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, upper, left + w, upper + h
    # A very long image: the largest part of its middle that has an allowed shape.
    return _centered(width, height, min(width, height * RATIO[1]), min(height, width / RATIO[0]))


def center_box(width: int, height: int) -> Box:
    """Return the square in the middle of an image: left, upper, right, lower."""
    side = min(width, height) * CENTER
    return _centered(width, height, side, side)


def _centered(width: int, height: int, w: float, h: float) -> Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


@dataclass(frozen=True)
class ImageData:
    """Images with their classes.

    Attributes:
        name: what the data are called.
        training: images to train on.
        validation: images to evaluate on.
        classes: names of the classes.
    """

    name: str
    training: Images
    validation: Images
    classes: Sequence[str]

    @classmethod
    def of(cls, inputs: VisionInputs[ImageFolderConfig]) -> ImageData:
        """Open the images that a configuration refers to."""
        config, classes = inputs.config, inputs.classes
        training: Images
        validation: Images
        if inputs.images is None:
            training = FakeImages(FAKE_TRAINING, len(classes), config.image_size)
            validation = FakeImages(FAKE_VALIDATION, len(classes), config.image_size)
        else:
            first, second = inputs.images
            assert isinstance(first, ImageFolder)
            assert isinstance(second, ImageFolder)
            size, threads = config.image_size, config.threads
            training = FolderImages(first, size, Augment.RANDOM_CROP, threads)
            validation = FolderImages(second, size, Augment.CENTER_CROP, threads)
        return cls(inputs.facts()["data"]["name"], training, validation, classes)


def vision_task(
    inputs: VisionInputs[VisionConfig],
    place: TrainContext,
    data: ImageData,
    *,
    program: Program,
    schedule: Schedule,
    load: Callable[[Path], nn.Module],
    loaded_into: str,
    config_json: str | None = None,
) -> Task:
    """Return the task of training a classifier.

    At the end the model is written as one safetensors file, loaded again and evaluated: what
    others get from the file is what was trained.

    Args:
        inputs: what the user asks for.
        place: where this rank trains.
        data: images with their classes.
        program: the model, sharded, and how a step is taken.
        schedule: of the learning rate.
        load: builds the same model from a safetensors file, on this rank's device.
        loaded_into: what ``load`` makes: ``a plain module``.
        config_json: of the model, as ``transformers`` reads it; None: the model is not theirs.
    """
    train, world, optimizer = inputs.train, place.world, program.make_optimizer()
    assert optimizer is not None
    at_a_time = inputs.config.eval_batch_size or train.batch_size
    evaluation = Evaluation(data.validation, len(data.classes), at_a_time, world, place.device)
    files = inputs.config.files
    read = functools.partial(read_drawn, data.training)
    # One is enough, and many large images would take much memory.
    batches = ReadAhead(Shuffled(len(data.training), train.seed, read), world.size, ahead=1)

    def finish(checkpoint: Place, results: Mapping[str, float]) -> Mapping[str, float]:
        say = place.display.say

        def write() -> None:
            try:
                consolidate(checkpoint, files.weights, force=True)
            except (CheckpointError, OSError) as error:
                kept = f"{checkpoint} is complete"
                raise SaveError(f"{files.weights}: {error}; {kept}") from error

        on_rank_zero(f"writing {files.weights}", write)
        say(f"weights    {files.weights}")
        scores = evaluation(load(files.weights))
        if world.rank == 0:
            say(
                f"reloaded   accuracy {scores.accuracy:.4f} from this file alone, loaded into "
                f"{loaded_into}; {results['accuracy']:.4f} before"
            )
            title = f"{inputs.model} on {data.name}"
            plot_confusion(scores.confusion.tolist(), data.classes, title, files.confusion)
            say(f"confusion  {files.confusion}")
        return {**results, "accuracy_of_file": scores.accuracy}

    return Task(
        model_name=inputs.model,
        program=program,
        model_config=config_json,
        optimizer=optimizer,
        schedule=schedule,
        data=batches,
        evaluate=lambda: evaluation(program.model).values(),
        unit="images",
        example="images",
        introduction=[
            (
                "data",
                f"{data.name}: {len(data.training):,} images to train on, "
                f"{len(data.validation):,} for validation; {len(data.classes)} classes",
            )
        ],
        close=batches.close,
        finish=finish,
    )


def vision_program(
    blueprint: Blueprint, inputs: VisionInputs[VisionConfig], place: TrainContext
) -> Program:
    """Return the program of training a classifier, not sharded yet."""
    example = (classification_loss, average_running_statistics)
    return program_of(blueprint, inputs.train, place, *example)


def curve_of(inputs: VisionInputs[VisionConfig], world: World) -> Schedule:
    """Return the schedule of an optimizer's configuration.

    By examples: in a resumed run, steps before may have had another number of them.
    """
    assert isinstance(inputs.train.optimizer, OptimizerConfig)
    per_step = inputs.train.examples_per_step(world.size)
    curve = learning_rate(inputs.train.optimizer, inputs.span.steps_in_all(per_step))
    return lambda position: curve(position.examples / per_step)


def load_plain(build: Callable[[], nn.Module], device: torch.device, file: Path) -> nn.Module:
    """Load a model from a safetensors file without sharding: each rank has all of it.

    Args:
        build: builds the model that the file is loaded into.
        device: where the model goes.
        file: the model.
    """
    model = build()
    model.load_state_dict(load_file(file))
    return model.to(device)


# -- loss and evaluation ---------------------------------------------------------------------------


def logits_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the logits of images, float32 of shape (count, classes).

    Args:
        model: returns logits, or an output of ``transformers`` that has them.
        images: (count, channels, height, width).
    """
    output: Any = model(images)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, a float32 scalar, in nats."""
    images, classes = batch
    return F.cross_entropy(logits_of(model, images), classes)


def example_of(channels: int, size: int) -> Example:
    """Return batches of images with these channels and pixels, and their loss."""

    def batch(count: int) -> Batch:
        return Batch(torch.zeros(count, channels, size, size), torch.zeros(count, dtype=torch.long))

    return Example(batch=batch, loss=classification_loss, after_step=average_running_statistics)


@dataclass(frozen=True)
class Scores:
    """How well images were classified.

    Attributes:
        loss: mean cross-entropy, in nats.
        confusion: number of images by class (row) and predicted class (column), int64 of shape
            (classes, classes).
        top5: fraction of the images whose class was among the five most likely ones.
    """

    loss: float
    confusion: torch.Tensor
    top5: float

    @property
    def accuracy(self) -> float:
        """Fraction of the images whose class was the most likely one."""
        return self.confusion.diagonal().sum().item() / self.confusion.sum().item()

    def values(self) -> dict[str, float]:
        """Return the metrics; top-5 accuracy means something with more than ten classes."""
        values = {"validation_loss": self.loss, "accuracy": self.accuracy}
        return {**values, "accuracy_top5": self.top5} if len(self.confusion) > 10 else values


@dataclass
class Evaluation:
    """Evaluates models on images that all ranks share.

    Attributes:
        images: to evaluate on.
        classes: number of classes.
        batch_size: of this rank.
        world: this rank among all.
        device: where it computes.
    """

    images: Images
    classes: int
    batch_size: int
    world: World
    device: torch.device

    def __call__(self, model: nn.Module) -> Scores:
        """Evaluate a model. Every rank calls it, and gets the scores of all ranks together."""
        mine = range(self.world.rank, len(self.images), self.world.size)
        # As many forwards on every rank, since a forward of a sharded model takes all.
        per_round = self.batch_size * self.world.size
        rounds = -(-len(self.images) // per_round)
        sums = torch.zeros(2, dtype=torch.float64)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64)
        with evaluating(model):
            for turn in range(rounds):
                indices = mine[turn * self.batch_size : (turn + 1) * self.batch_size]
                # A rank that has none left looks at the first image again, uncounted.
                images, classes = self.images.read(indices or [0], [0] * max(1, len(indices)))
                logits = logits_of(model, images.to(self.device)).cpu()
                if indices:
                    sums += self._tally(logits, classes, confusion)
        with Peers().collective("the sum of scores"):
            dist.all_reduce(sums)
            dist.all_reduce(confusion)
        loss, top5 = (sums / len(self.images)).tolist()
        return Scores(loss, confusion.view(self.classes, self.classes), top5)

    def _tally(
        self, logits: torch.Tensor, classes: torch.Tensor, confusion: torch.Tensor
    ) -> torch.Tensor:
        """Count a batch; return its sums of the loss and of hits among the top five."""
        pairs = classes * self.classes + logits.argmax(dim=1)
        confusion += torch.bincount(pairs, minlength=self.classes**2)
        likeliest = logits.topk(min(5, self.classes), dim=1).indices
        hits = (likeliest == classes[:, None]).any(dim=1).sum()
        loss = F.cross_entropy(logits, classes, reduction="sum")
        return torch.stack([loss.double(), hits.double()])


# -- the confusion matrix, as a picture ------------------------------------------------------------

BLUE, RED, WHITE = (31, 95, 168), (192, 57, 43), (255, 255, 255)
#: More classes than this are shown without names and numbers, which would be unreadable.
_FEW = 20
_LONGEST = 24  # letters of a name


def plot_confusion(
    counts: Sequence[Sequence[int]], classes: Sequence[str], title: str, path: Path
) -> None:
    """Draw a confusion matrix into a PNG.

    Args:
        counts: number of images by class (row) and predicted class (column).
        classes: their names.
        title: above the chart.
        path: the file; replaced once the new one is complete.
    """
    few = len(classes) <= _FEW
    cell = 48 if few else max(1, 960 // len(classes))
    font = ImageFont.load_default(14)
    shown = [name[:_LONGEST] for name in classes]
    left = 24 + int(max(map(font.getlength, shown))) if few else 24
    names = left if few else 24  # those of columns stand upright, above them
    top, size = 40 + names, cell * len(classes)
    image = Image.new("RGB", (max(left + size, 480) + 24, top + size + 40), WHITE)
    draw = ImageDraw.Draw(image)
    total, right = sum(map(sum, counts)), sum(row[i] for i, row in enumerate(counts))
    draw.text((12, 12), f"{title}: {right:,} of {total:,} correct", "black", font)
    draw.text((left, top + size + 12), "row: class; column: predicted class", "black", font)
    for i, (name, row) in enumerate(zip(shown, counts, strict=True)):
        if few:
            draw.text((12, top + (i + 0.5) * cell), name, "black", font, "lm")
            upright = Image.new("RGB", (names, 18), WHITE)
            ImageDraw.Draw(upright).text((0, 9), name, "black", font, "lm")
            turned = upright.rotate(90, expand=True)
            image.paste(turned, (left + int((i + 0.5) * cell) - 9, top - names - 4))
        for j, n in enumerate(row):
            # By row, so that a rare class is as legible as a frequent one. Mistakes are few: the
            # root makes them visible beside what is right.
            shade = (n / max(1, sum(row))) ** 0.5
            color = tuple(round(255 + shade * (each - 255)) for each in BLUE)
            x, y = left + j * cell, top + i * cell
            draw.rectangle((x, y, x + cell - 1, y + cell - 1), color)
            if few and n:
                ink = WHITE if shade > 0.45 else BLUE if i == j else RED
                draw.text((x + cell / 2, y + cell / 2), f"{n}", ink, font, "mm")
    temporary = path.with_name(f".{path.name}")
    image.save(temporary, format="png")
    temporary.replace(path)
