"""Models of ``transformers``: built without memory, initialized shard by shard, and their FLOPs."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from shardwise import materialize
from shardwise.base import devices
from shardwise.insight.planning import models
from shardwise.insight.planning.machine import device_reported_as
from shardwise.insight.schema.option import naming

# Those of the planner; what cannot be built is a mistake in --model here, an OptionError.
build = naming("--model")(models.build)
build_classifier = naming("--model")(models.build_classifier)
decoder_layers = naming("--model")(models.decoder_layers)


def config_json(model: PreTrainedModel) -> str:
    """Return the ``config.json`` that ``from_pretrained`` needs to make this model."""
    settings = json.loads(model.config.to_json_string())
    settings.pop("use_cache", None)  # of training alone
    return json.dumps(settings, indent=2) + "\n"


def initialize(model: PreTrainedModel, seed: int) -> None:
    """Initialize the shards; the values depend on the seed alone, not on the mesh."""
    torch.manual_seed(seed)
    materialize(model)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of every next token, a float32 scalar, in nats.

    Args:
        model: maps (batch, length) int64 to ``.logits`` of shape (batch, length, vocabulary).
        tokens: (batch, length + 1) int64.
    """
    logits = model(input_ids=tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def flops_per_token(model: PreTrainedModel, seq_length: int) -> float:
    """Return the FLOPs of forward and backward for one token.

    Six for every parameter that is multiplied with, four if it is frozen, and 12 x layers x width x
    length for the products of attention. The embedding is looked up in, not multiplied with, unless
    it is the head as well.

    Args:
        model: sharded or not.
        seq_length: tokens of a sequence.
    """
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = head is not None and head.weight is embedding
    looked_up = set() if tied else {embedding}
    multiplied = [p for p in model.parameters() if p not in looked_up]
    products = sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied)
    config = model.config.get_text_config()
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_length
    return float(products + attention)


@dataclass(frozen=True)
class Utilization:
    """Model FLOPs utilization (MFU), as PaLM defines it (Chowdhery et al. 2022, appendix B).

    The operations that the model needs for forward and backward, over those that the devices could
    have done in the time. Activations that are computed again do not count as needed.

    Attributes:
        per_token: operations for forward and backward of a token.
        device: what the device is called.
        peak: operations a second that one device could do; None: not known.
        given: whether the user said so.
    """

    per_token: float
    device: str
    peak: float | None
    given: bool

    @classmethod
    def of(
        cls, model: PreTrainedModel, seq_length: int, device: torch.device, given: float | None
    ) -> Utilization:
        """Return the numbers of a model on a device; ``given`` overrides the data sheet."""
        name = devices.name(device)
        known = device_reported_as(name)
        peak = None if known is None else known.peak("bfloat16")
        per_token = flops_per_token(model, seq_length)
        return cls(per_token, name, given or peak, given is not None)

    def peak_tokens_per_s(self, devices: int) -> float | None:
        """Return the speed at an MFU of 1 on n devices."""
        return None if self.peak is None else devices * self.peak / self.per_token

    def __str__(self) -> str:
        needed = f"{self.per_token / 1e9:.3g} GFLOP per token, forward and backward"
        if self.peak is None:
            where = "CPUs" if self.device == "cpu" else self.device
            return f"{needed}; MFU needs --peak-flops on {where}"
        source = "as --peak-flops says" if self.given else f"{self.device} in bf16"
        return f"{needed}; MFU of {self.peak / 1e12:,.4g} TFLOP/s per rank, {source}"
