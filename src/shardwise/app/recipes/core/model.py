"""Models of ``transformers``: built without memory, initialized, their FLOPs, what they draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise import materialize
from shardwise.app.recipes.core.build import kept_between_forwards
from shardwise.base import devices
from shardwise.base.errors import CheckpointError
from shardwise.insight.planning import models
from shardwise.insight.planning.machine import device_reported_as
from shardwise.insight.schema.option import naming
from shardwise.insight.schema.training import Logits
from shardwise.insight.token_loss import TokenLoss

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


WHOLE = TokenLoss(Logits.WHOLE)


def next_token_loss(
    model: nn.Module, tokens: torch.Tensor, loss: TokenLoss = WHOLE
) -> torch.Tensor:
    """Return the mean cross-entropy of every next token, a float32 scalar, in nats.

    Args:
        model: maps (batch, length) int64 to ``.logits`` of shape (batch, length, vocabulary).
        tokens: (batch, length + 1) int64.
        loss: of tokens.
    """
    return loss(model, tokens[:, 1:], input_ids=tokens[:, :-1])


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


# -- tokens that a language model draws ------------------------------------------------------------
#
# Every rank draws the same tokens from the same logits, since all have the same seed. Each forward
# gathers the shards of all ranks. ``generate`` of ``transformers`` is not used: it draws rows of
# the embedding that no token has, and stops where the positions of the model end.

# Up to this size the parameters stay whole from token to token; a larger model is gathered anew.
KEEP_WHOLE_BYTES = 2**28
#: What models call the keys and values of earlier tokens; ``cache`` as of transformers 5.24.
_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: 0 takes the most likely token; 1 draws from the probabilities of the model.
        top_k: draw from this many of the most likely tokens; 0: from all.
        top_p: draw from the most likely tokens that have this probability together (nucleus
            sampling, Holtzman et al. 2019); 1: from all.
        seed: of the drawing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def drawing(self) -> Callable[[torch.Tensor], int]:
        """Return a function that draws a token from float32 logits of shape (vocabulary,)."""
        from transformers.generation.logits_process import (
            LogitsProcessorList,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        if self.temperature == 0:
            return lambda logits: int(logits.argmax())
        warpers: Any = LogitsProcessorList()
        if self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        generator = torch.Generator().manual_seed(self.seed)

        def draw(logits: torch.Tensor) -> int:
            odds = torch.softmax(warpers(None, logits[None])[0], dim=-1)
            return int(torch.multinomial(odds, 1, generator=generator))

        return draw


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    *,
    vocab_size: int,
    window: int,
    device: torch.device,
    stop: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Continue a prompt. Every rank iterates over it to its end, and gets the same tokens.

    Args:
        model: a causal language model of ``transformers``, sharded or not.
        prompt: at least one token.
        count: the most tokens to draw.
        sampling: how they are drawn.
        vocab_size: tokens from here up are never drawn.
        window: the most tokens that the model attends to. When that many are there, the older half
            is forgotten.
        device: where the model computes.
        stop: tokens that end the text; they are not returned.

    Yields:
        A token at a time.

    Raises:
        CheckpointError: the model computes what is no number.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    draw = sampling.drawing()
    model.eval()
    context = list(prompt)[-window:]
    cache: dict[str, Any] = {}
    keep = getattr(model, "keep_unsharded", None) if size <= KEEP_WHOLE_BYTES else None
    with kept_between_forwards(model) if keep is None else keep():
        for _ in range(count):
            if len(context) > window:
                context, cache = context[-max(1, window // 2) :], {}
            # With a cache the model remembers all but the newest token.
            fresh = context[-1:] if cache else context
            inputs = torch.tensor([fresh], device=device)
            output = model(input_ids=inputs, use_cache=True, **cache)
            name = next((each for each in _CACHES if getattr(output, each, None) is not None), "")
            cache = {name: getattr(output, name)} if name else {}
            logits = output.logits[0, -1, :vocab_size].float().cpu()
            if logits.isnan().any() or not logits.max().isfinite():
                raise CheckpointError(
                    f"found logits that are not finite after {len(context):,} tokens, expected "
                    "numbers; the weights are broken, or their dtype is too small"
                )
            token = draw(logits)
            if token in stop:
                return
            yield token
            context.append(token)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, by the tokenizer and by the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return frozenset(each for each in (*listed, tokenizer.eos_token_id) if each is not None)
