"""MNIST in small: pictures that a net learns in seconds, in files as MNIST's are."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path
from typing import Any

from shardwise.app.recipes.vision.config import MnistConfig
from shardwise.app.recipes.vision.files import CLASSES, SIDE
from shardwise.insight.schema.training import OptimizerConfig
from tests.recipes.small import train_config


def picture(label: int, draw: random.Random) -> bytes:
    """A blot on noise; where it lies tells the class."""
    row, column = divmod(label, 4)
    pixels = bytearray(draw.randrange(60) for _ in range(SIDE * SIDE))
    top, left = 2 + 9 * row + draw.randrange(3), 1 + 6 * column + draw.randrange(3)
    for y in range(top, min(top + 6, SIDE)):
        for x in range(left, min(left + 5, SIDE)):
            pixels[y * SIDE + x] = 255 - draw.randrange(60)
    return bytes(pixels)


def idx(sizes: list[int], values: bytes) -> bytes:
    """An IDX file of bytes."""
    return bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}I", *sizes) + values


def write_digits(folder: Path, training: int = 203, test: int = 45) -> Path:
    """The four files; those of the test set gzipped. Odd numbers, so that no batch fits evenly."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for part, count in (("train", training), ("t10k", test)):
        labels = bytes(draw.randrange(CLASSES) for _ in range(count))
        images = b"".join(picture(label, draw) for label in labels)
        files = {
            f"{part}-images-idx3-ubyte": idx([count, SIDE, SIDE], images),
            f"{part}-labels-idx1-ubyte": idx([count], labels),
        }
        for name, content in files.items():
            if part == "train":
                (folder / name).write_bytes(content)
            else:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    return folder


def small_mnist(folder: Path, name: str = "run", **changes: Any) -> MnistConfig:
    """A configuration of one epoch in a few steps.

    Args:
        folder: where the data are (written if they are not), and where the run goes.
        name: of the run's folder.
        changes: settings by their innermost names, or ``nested``.
    """
    data = folder / "mnist"
    if not data.exists():
        write_digits(data)
    given = {"epochs": 1, "batch_size": 16, "eval_every": 1, **changes}
    config = MnistConfig(
        data_dir=data,
        nested=given.pop("nested", False),
        train=train_config(folder / name, given, OptimizerConfig(lr=5e-3, warmup=2, beta2=0.999)),
    )
    assert not given, f"unknown settings: {sorted(given)}"
    return config
