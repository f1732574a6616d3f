"""Tokens that a language model draws: at the end of a training, and by ``shardwise generate``.

Every rank draws the same tokens from the same logits, since all have the same seed; each forward
gathers the shards of all ranks. ``generate`` of ``transformers`` is not used: it draws rows of the
embedding that no token has, and stops where the positions of the model end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.app.recipes.core.build import kept_between_forwards
from shardwise.base.errors import CheckpointError

# Up to this size the parameters stay whole from token to token; a larger model is gathered anew.
KEEP_WHOLE_BYTES = 2**28


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
    cache = None
    keep = getattr(model, "keep_unsharded", None) if size <= KEEP_WHOLE_BYTES else None
    with kept_between_forwards(model) if keep is None else keep():
        for _ in range(count):
            if len(context) > window:
                context, cache = context[-max(1, window // 2) :], None
            # With a cache the model remembers all but the newest token.
            fresh = context if cache is None else context[-1:]
            inputs = torch.tensor([fresh], device=device)
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
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
