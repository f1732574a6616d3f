"""What the model writes: tokens drawn one after another, on all ranks together.

Every rank draws the same token from the same logits, since all have the same seed: each forward
gathers the shards of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise import FSDPModule
from shardwise.recipes.sharded import kept_between_forwards

# Up to this size the parameters stay whole from token to token; a larger model is gathered anew.
KEEP_WHOLE_BYTES = 2**28


@torch.no_grad()
def sample_tokens(
    model: FSDPModule,
    prompt: Sequence[int],
    count: int,
    *,
    vocab_size: int,
    temperature: float,
    window: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue a prompt. Every rank calls it and gets the same tokens.

    Args:
        model: a causal language model of ``transformers``.
        prompt: at least one token.
        count: tokens to draw.
        vocab_size: tokens from here up are never drawn.
        temperature: 0 takes the likeliest token; 1 draws as the model has learnt.
        window: the most tokens that the model looks back at, as in training; where they are
            full, the older half is forgotten.
        seed: of the drawing.
        device: where the model computes.
    """
    module = model
    assert isinstance(module, nn.Module)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    drawn: list[int] = []
    context = list(prompt)[-window:]
    cache = None
    whole = size <= KEEP_WHOLE_BYTES
    with model.keep_unsharded() if whole else kept_between_forwards(module):
        for _ in range(count):
            if len(context) > window:
                context, cache = context[-max(1, window // 2) :], None
            # With a cache the model remembers all but the newest token.
            fresh = context if cache is None else context[-1:]
            inputs = torch.tensor([fresh], device=device)
            output = module(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = getattr(output, "past_key_values", None)
            logits = output.logits[0, -1, :vocab_size].float().cpu()
            drawn.append(_draw(logits, temperature, generator))
            context.append(drawn[-1])
    return drawn


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    odds = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(odds, 1, generator=generator))
