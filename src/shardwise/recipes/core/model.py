"""Models of ``transformers``, built on the meta device and initialized shard by shard."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    PreTrainedModel,
)

from shardwise import materialize
from shardwise.recipes.core.config import OptionError


def build(
    settings: dict[str, Any], vocab_size: int | None, separator: int | None
) -> PreTrainedModel:
    """Build a causal language model on the meta device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        vocab_size: rows of the embedding, whatever the settings say; ``None``: as they say.
        separator: the token that stands between documents; ``None``: as they say.

    Raises:
        OptionError: ``transformers`` cannot make a causal language model of the settings.
    """
    own: dict[str, Any] = {"use_cache": False}
    if vocab_size is not None:
        own |= {"vocab_size": vocab_size}
    if separator is not None:
        own |= {"bos_token_id": separator, "eos_token_id": separator, "pad_token_id": None}
    with torch.device("meta"):
        return _from_settings(AutoModelForCausalLM, {**settings, **own}, "causal language model")


def build_classifier(settings: dict[str, Any], classes: int) -> PreTrainedModel:
    """Build an image classifier on the default device.

    Args:
        settings: as in a ``config.json`` of ``transformers``.
        classes: number of classes, whatever the settings say.

    Raises:
        OptionError: ``transformers`` cannot make an image classifier of the settings.
    """
    own = {"num_labels": classes}
    rest = {k: v for k, v in settings.items() if k not in ("id2label", "label2id")}
    return _from_settings(AutoModelForImageClassification, {**rest, **own}, "image classifier")


def _from_settings(family: Any, settings: dict[str, Any], kind: str) -> PreTrainedModel:
    rest = {k: v for k, v in settings.items() if k not in ("model_type", "torch_dtype", "dtype")}
    try:
        config = AutoConfig.for_model(settings["model_type"], **rest, dtype="float32")
        model = family.from_config(config, dtype=torch.float32)
    except Exception as error:  # each of its models checks in its own way
        # Their first sentence; a list of everything that would do follows.
        first = " ".join(str(error).split()).partition(". ")[0]
        reason = textwrap.shorten(first, 200, placeholder=" ...")
        raise OptionError(
            "--model",
            f"settings that transformers cannot use ({reason})",
            f"those of {'an' if kind[0] in 'aeiou' else 'a'} {kind}",
        ) from error
    assert isinstance(model, PreTrainedModel)
    model.config.architectures = [type(model).__name__]  # as it is called before it is sharded
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let every layer keep only its inputs, and recompute the rest in backward."""
    # The newer name of transformers 5.x, or the older one.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def config_json(model: PreTrainedModel) -> str:
    """Return the ``config.json`` that ``from_pretrained`` needs to make this model."""
    settings = json.loads(model.config.to_json_string())
    settings.pop("use_cache", None)  # of training alone
    return json.dumps(settings, indent=2) + "\n"


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Initialize the shards; the values depend on the seed alone, not on the mesh."""
    # Nested models of one model may each have rules of their own for their modules.
    owner = {
        module: part
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
        for module in part.modules()
    }

    def init(module: nn.Module) -> None:
        owner[module]._init_weights(module)  # type: ignore[no-untyped-call]

    torch.manual_seed(seed)
    materialize(model, init=init)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks: the longest list of modules in the model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        name = type(model).__name__
        raise OptionError("--model", f"{name} without a list of layers", "a model made of layers")
    longest = max(lists, key=len)
    return list(longest)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of every next token, a float32 scalar, in nats.

    Args:
        model: maps (batch, length) int64 to ``.logits`` of shape (batch, length, vocabulary).
        tokens: (batch, length + 1) int64.
    """
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
