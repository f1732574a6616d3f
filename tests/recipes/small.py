"""A language model so small that a step takes milliseconds, and text to train it on."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from shardwise.app.recipes.core.recipe import RecipeConfig
from shardwise.app.recipes.text import config as text
from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.vision import config as vision
from shardwise.insight.schema.sharding import ShardingConfig
from shardwise.insight.schema.training import (
    Logits,
    OptimizerConfig,
    OutputConfig,
    SgdConfig,
    TrainConfig,
)
from shardwise.runs.metrics_file import read_metrics

#: Each kind of training with all its defaults, by its name.
RECIPES: dict[str, RecipeConfig] = {**text.DEFAULTS, **vision.DEFAULTS}

#: Odd sizes, so that shards are uneven; dropout, so that random states matter.
MODEL = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A ``config.json`` for the model."""
    path = folder / "config.json"
    path.write_text(json.dumps({**MODEL, **changes}))
    return path


def write_text(folder: Path) -> Path:
    """Some 20 kB of words that repeat."""
    words = ["shard", "unshard", "reshard", "gather", "reduce", "scatter", "rank", "mesh"]
    path = folder / "words.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=3000)))
    return path


#: What makes a model with one block of each recipe: a rehearsal takes time by operations.
ONE_BLOCK = {
    "lm": {"model": str(Path(__file__).with_name("one_block.json"))},
    "imagenet": {"model": "tiny", "image_size": 32},
    "vit": {"layers": 1},
}


def small_config(folder: Path, name: str = "run", **changes: Any) -> LmConfig:
    """A configuration of a few short steps.

    Args:
        folder: where model and text are (written if they are not), and where the run goes.
        name: of the run's folder.
        changes: settings by their innermost names, or ``model``.
    """
    if not (folder / "words.txt").exists():
        write_text(folder)
    if not (folder / "config.json").exists():
        write_model(folder)
    given = {"steps": 4, "batch_size": 2, **changes}
    config = LmConfig(
        model=given.pop("model", str(folder / "config.json")),
        data=(str(folder / "words.txt"),),
        seq_length=given.pop("seq_length", 16),
        sample_tokens=given.pop("sample_tokens", 0),
        logits=given.pop("logits", Logits.AUTO),
        train=train_config(folder / name, given, OptimizerConfig(lr=1e-2, warmup=2)),
    )
    assert not given, f"unknown settings: {sorted(given)}"
    return config


def train_config(
    out: Path, given: dict[str, Any], optimizer: OptimizerConfig | SgdConfig
) -> TrainConfig:
    """Take from ``given`` what belongs to every training, by the innermost names.

    Args:
        out: folder of the run.
        given: settings; those that are taken are removed.
        optimizer: its settings, where none are given.
    """

    def take(kind: Any) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(kind)]
        return {name: given.pop(name) for name in names if name in given}

    return TrainConfig(
        optimizer=dataclasses.replace(optimizer, **take(optimizer)),
        output=OutputConfig(out=out, **take(OutputConfig)),
        sharding=ShardingConfig(**take(ShardingConfig)),
        **take(TrainConfig),
    )


def losses(config: Any) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step that the run has written down."""
    records = read_metrics(config.files.metrics)
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]


def validation(config: Any, what: str = "validation_loss") -> list[tuple[int, float]]:
    """Step and validation loss, or another figure, each time that it was looked at."""
    records = read_metrics(config.files.metrics)
    return [(r["step"], r[what]) for r in records if what in r]
