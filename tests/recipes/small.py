"""A language model so small that a step takes milliseconds, and text for it to learn from."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from shardwise.recipes.config import AdamWConfig, OutputConfig, ShardingConfig, TrainConfig
from shardwise.recipes.lm_config import LmConfig
from shardwise.recipes.metrics import read_metrics

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
    given = dict(changes)

    def take(*names: str) -> dict[str, Any]:
        return {name: given.pop(name) for name in names if name in given}

    config = LmConfig(
        model=given.pop("model", str(folder / "config.json")),
        data=(str(folder / "words.txt"),),
        seq_length=16,
        sample_tokens=given.pop("sample_tokens", 0),
        train=TrainConfig(
            optimizer=AdamWConfig(
                **{"lr": 1e-2, "warmup": 2, **take("lr", "warmup", "betas", "weight_decay")}
            ),
            output=OutputConfig(
                out=folder / name,
                **take("checkpoint_every", "keep_last", "eval_every", "resume", "overwrite"),
            ),
            sharding=ShardingConfig(
                **take("strategy", "replicas", "param_dtype", "activation_checkpointing")
            ),
            **{
                "steps": 4,
                "batch_size": 2,
                **take("steps", "batch_size", "accumulate", "seed", "diloco"),
            },
        ),
    )
    assert not given, f"unknown settings: {sorted(given)}"
    return config


def losses(config: LmConfig) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step that the run has written down."""
    records = read_metrics(config.files.metrics)
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]


def validation(config: LmConfig) -> list[tuple[int, float]]:
    """Step and validation loss, each time that it was looked at."""
    records = read_metrics(config.files.metrics)
    return [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
