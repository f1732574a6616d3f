"""ImageNet in small: folders of pictures that a tiny net learns in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwise.app.recipes.vision.config import ImagenetConfig
from shardwise.insight.schema.training import SgdConfig
from tests.recipes.small import train_config

COLORS = {"grass": (40, 160, 60), "rust": (170, 80, 40), "sea": (30, 90, 180)}


def write_snapshots(folder: Path, training: int = 26, validation: int = 5) -> Path:
    """Noisy images of three colors, of several shapes and kinds of files."""
    draw = np.random.default_rng(0)
    for part, count in (("train", training), ("val", validation)):
        for name, color in COLORS.items():
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                shape = (int(draw.integers(36, 60)), int(draw.integers(36, 60)), 3)
                pixels = np.clip(draw.normal(color, 50, shape), 0, 255).astype(np.uint8)
                image = Image.fromarray(pixels)
                if number == 1:
                    image.convert("P").save(place / f"{number}.png")  # a palette, not RGB
                else:
                    image.save(place / f"{number}.JPEG")
    return folder


def small_imagenet(folder: Path, name: str = "run", **changes: Any) -> ImagenetConfig:
    """A configuration of one epoch in a few steps.

    Args:
        folder: where the pictures are (written if they are not), and where the run goes.
        name: of the run's folder.
        changes: settings by their innermost names.
    """
    data = folder / "snapshots"
    if "data_dir" not in changes and not data.exists():
        write_snapshots(data)
    given = {"epochs": 1, "batch_size": 8, "eval_every": 1, **changes}
    train = train_config(folder / name, given, SgdConfig(lr=0.05))
    own = {"model": "tiny", "image_size": 32, "warmup_epochs": 0.5, "threads": 2}
    return ImagenetConfig(**{"data_dir": data, **own, **given}, train=train)
