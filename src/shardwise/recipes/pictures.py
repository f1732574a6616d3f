"""Pictures as batches for training, in an order of the seed's, and for evaluation, in their own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from shardwise.recipes.shuffle import Shuffle, mix

Batch = tuple[torch.Tensor, torch.Tensor]


class Pictures(Protocol):
    """Pictures with their classes."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """Some of them, on the CPU.

        Args:
            indices: which.
            keys: 64 bits for each, by which whatever is done at random is drawn.

        Returns:
            Pictures, float32 of shape (count, channels, height, width), normalised; and classes,
            int64 of shape (count,).
        """


class TrainingPictures:
    """Batches in an order that the seed and the position alone decide.

    The next batch of this rank is read while the model computes with this one.

    Args:
        pictures: what to take.
        seed: of the order, and of what is done to pictures at random.
        stride: examples from one batch of this rank to its next: those of one microbatch of all.
        device: where batches go.
    """

    def __init__(self, pictures: Pictures, seed: int, stride: int, device: torch.device) -> None:
        self._pictures = pictures
        self._order = Shuffle(len(pictures), seed)
        self._stride = stride
        self._device = device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="pictures")
        self._ahead: tuple[tuple[int, int], Future[Batch]] | None = None

    def batch(self, position: int, count: int) -> Batch:
        """Examples ``position`` .. ``position + count`` of the order."""
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
        return self._pictures.read([draw.index for draw in draws], keys)


class FakePictures:
    """One picture of noise, as often as asked: to measure speed without a disk.

    Args:
        count: how many.
        classes: how many; the picture is of each in turn.
        size: height and width.
    """

    def __init__(self, count: int, classes: int, size: int) -> None:
        self._count = count
        self._classes = classes
        self._image = torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """How many there are."""
        return self._count

    def read(self, indices: Sequence[int], keys: Sequence[int]) -> Batch:
        """The picture, with the classes that go with the indices."""
        del keys
        images = self._image.expand(len(indices), -1, -1, -1)
        return images, torch.tensor(indices) % self._classes
