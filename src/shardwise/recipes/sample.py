"""What the model writes: tokens drawn one after another, on all ranks together.

Every rank draws the same token from the same logits, since all have the same seed: each forward
gathers the shards of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise import FSDPModule

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
    positions: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue a prompt. Every rank calls it and gets the same tokens.

    Args:
        model: a causal language model of ``transformers``.
        prompt: at least one token.
        count: tokens to draw; fewer where the model's positions end.
        vocab_size: tokens from here up are never drawn.
        temperature: 0 takes the likeliest token; 1 draws as the model has learnt.
        positions: the longest sequence that the model takes.
        seed: of the drawing.
        device: where the model computes.
    """
    module = model
    assert isinstance(module, nn.Module)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    if size <= KEEP_WHOLE_BYTES:
        model.set_reshard_after_forward(False)
    generator = torch.Generator().manual_seed(seed)
    module.eval()
    tokens = list(prompt)
    fresh, cache = tokens, None
    for _ in range(min(count, positions - len(tokens))):
        inputs = torch.tensor([fresh], device=device)
        output = module(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        logits = output.logits[0, -1, :vocab_size].float().cpu()
        tokens.append(_draw(logits, temperature, generator))
        # With a cache the model remembers what it has read.
        fresh = tokens if cache is None else tokens[-1:]
    return tokens[len(prompt) :]


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    odds = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(odds, 1, generator=generator))
