"""ImageNet in small: folders of pictures that tiny nets learn in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardwise.app.recipes.vision.config import ImagenetConfig, VitConfig
from shardwise.insight.schema.training import OptimizerConfig, SgdConfig
from tests.recipes.small import train_config

#: A Vision Transformer of odd sizes.
LEARNING = {
    "model_type": "vit",
    "hidden_size": 24,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 8,
}
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


def small_vit(folder: Path, name: str = "run", **changes: Any) -> VitConfig:
    """A configuration of one epoch in a few steps, on images that are written if they are not."""
    data = folder / "snapshots"
    if not data.exists():
        write_snapshots(data)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(LEARNING))
    given = {"epochs": 2, "batch_size": 8, "eval_every": 1, **changes}
    train = train_config(folder / name, given, OptimizerConfig(lr=5e-3, warmup=2))
    own = {"model": str(folder / "config.json"), "image_size": 32, "threads": 2}
    return VitConfig(**{"data_dir": data, **own, **given}, train=train)
