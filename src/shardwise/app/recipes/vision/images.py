"""Images as batches: decoded, cropped, normalized, in an order that the seed decides.

Whatever is random is drawn from a number that belongs to the image and its epoch, so that every
rank of every world, and a resumed run, do the same to it.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from shardwise.app.recipes.core.position import Shuffle
from shardwise.app.recipes.vision.files import ImageFolder
from shardwise.base.mixing import mix
from shardwise.elastic.errors import UserError

# Of ImageNet's pixels, by channel, of values 0 to 1: what published models are trained with.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

AREA = (0.08, 1.0)  # of the image, that a random crop has
RATIO = (3 / 4, 4 / 3)  # of width to height
ATTEMPTS = 10  # at a crop that lies inside the image
CENTER = 224 / 256  # of the shorter side, that evaluation looks at

Batch = tuple[torch.Tensor, torch.Tensor]
Box = tuple[float, float, float, float]


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


class TrainingImages:
    """Batches in an order that the seed and the position alone decide.

    The next batch of this rank is read while the model computes with this one.

    Args:
        images: where they come from.
        seed: of the order, and of whatever is random.
        stride: examples from one batch of this rank to its next: those of one microbatch of all.
        device: where batches go.
    """

    def __init__(self, images: Images, seed: int, stride: int, device: torch.device) -> None:
        self._images = images
        self._order = Shuffle(len(images), seed)
        self._stride = stride
        self._device = device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="images")
        self._ahead: tuple[tuple[int, int], Future[Batch]] | None = None

    def batch(self, position: int, count: int) -> Batch:
        """Return examples ``position`` .. ``position + count`` of the order."""
        asked = (position, count)
        if self._ahead is not None and self._ahead[0] == asked:
            images, classes = self._ahead[1].result()
        else:
            images, classes = self._read(*asked)
        following = (position + self._stride, count)
        self._ahead = (following, self._reader.submit(self._read, *following))
        return images.to(self._device), classes.to(self._device)

    def _read(self, position: int, count: int) -> Batch:
        draws = [self._order.at(p) for p in range(position, position + count)]
        keys = [mix(draw.key ^ draw.index) for draw in draws]
        return self._images.read([draw.index for draw in draws], keys)


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
        return images, torch.tensor(indices) % self._classes


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
        return (images - mean) / std, torch.tensor([number for _, number in found])

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
