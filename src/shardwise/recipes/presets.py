"""Language models by name, with settings that suit them. No torch here: the command line asks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.disk.strict import check_depth
from shardwise.errors import CheckpointError
from shardwise.recipes.config import OptionError


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a training does unless told otherwise.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences per rank.
        seq_length: tokens of a sequence.
        lr: peak learning rate.
    """

    steps: int
    batch_size: int
    seq_length: int
    lr: float


@dataclass(frozen=True, kw_only=True)
class LlamaPreset:
    """The shape of a Llama. The sizes in the names count everything but the vocabulary's rows.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the feed-forward blocks.
        layers: number of decoder layers.
        heads: attention heads.
        positions: longest sequence.
        defaults: for its training.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    defaults: Defaults

    def settings(self) -> dict[str, Any]:
        """As ``transformers`` names them."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
        }


PRESETS = {
    "llama-tiny": LlamaPreset(
        hidden=128,
        intermediate=384,
        layers=4,
        heads=4,
        positions=1024,
        defaults=Defaults(steps=600, batch_size=4, seq_length=128, lr=2e-3),
    ),
    "llama-34m": LlamaPreset(
        hidden=512,
        intermediate=2048,
        layers=8,
        heads=8,
        positions=2048,
        defaults=Defaults(steps=1000, batch_size=4, seq_length=512, lr=1e-3),
    ),
    "llama-150m": LlamaPreset(
        hidden=1024,
        intermediate=2688,
        layers=12,
        heads=16,
        positions=2048,
        defaults=Defaults(steps=2000, batch_size=8, seq_length=1024, lr=4e-4),
    ),
}

FOR_CONFIG_FILES = Defaults(steps=1000, batch_size=4, seq_length=256, lr=4e-4)


def defaults_for(model: str) -> Defaults:
    """The defaults that go with ``--model``."""
    preset = PRESETS.get(model)
    return FOR_CONFIG_FILES if preset is None else preset.defaults


def model_settings(model: str) -> dict[str, Any]:
    """The settings of a language model; see :func:`find_settings`."""
    return find_settings(model, {name: preset.settings() for name, preset in PRESETS.items()})


def find_settings(model: str, presets: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a preset, or of a ``config.json`` in the format of ``transformers``.

    Args:
        model: a preset's name, the path of a config file, or of a folder that holds one.
        presets: settings by name.

    Raises:
        OptionError: neither, or a file that is no model configuration.
    """
    if model in presets:
        return presets[model]
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = ", ".join(presets)
        near = difflib.get_close_matches(model, presets, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError("--model", model, f"{names}, or the path of a config.json{hint}")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        check_depth(settings, "it")
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise OptionError("--model", f"{file}, no JSON ({error})", "a config.json") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise OptionError("--model", f'{file} without "model_type"', "a config.json")
    return settings


def longest_sequence(settings: dict[str, Any]) -> int | None:
    """How many positions a model has, where its settings say."""
    found = settings.get("max_position_embeddings", settings.get("n_positions"))
    return found if isinstance(found, int) else None
