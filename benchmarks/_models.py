"""The models and batches that every contender trains: the same weights, the same tokens."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.insight.planning.presets import llama_settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BATCHES = 4
"""How many different batches a rank cycles through.

Few, so that the model memorises them and the loss falls within a benchmark: a contender that lost
a gradient on its way between ranks would then show another loss than its peers.
"""


_llama = functools.partial(llama_settings, positions=2048)
PRESETS = {
    "tiny": _llama(hidden=64, intermediate=176, layers=3, heads=4, vocabulary=256),  # for tests
    "5m": _llama(hidden=256, intermediate=688, layers=5, heads=4, vocabulary=2048),
    "34m": _llama(hidden=512, intermediate=1376, layers=8, heads=8, vocabulary=8192),
    "93m": _llama(hidden=768, intermediate=2048, layers=8, heads=12, vocabulary=24000),
    "150m": _llama(hidden=768, intermediate=2048, layers=14, heads=12, vocabulary=32000),
    "10m": _llama(hidden=320, intermediate=864, layers=6, heads=5, vocabulary=4096),
    "215m": _llama(hidden=896, intermediate=2464, layers=16, heads=14, vocabulary=32000),
    "400m": _llama(hidden=1152, intermediate=3200, layers=20, heads=18, vocabulary=32000),
    # For GPUs, the largest that fits.
    "1b": _llama(hidden=2048, intermediate=5632, layers=18, heads=16, vocabulary=32000),
    "3b": _llama(hidden=3072, intermediate=8192, layers=24, heads=24, vocabulary=32000),
    "6b": _llama(hidden=4096, intermediate=11008, layers=30, heads=32, vocabulary=32000),
}
"""Llamas with untied embeddings, by the number of their parameters."""


def numel(preset: str) -> int:
    """Count the parameters of a model that is not built."""
    size = PRESETS[preset]
    hidden, intermediate = size["hidden_size"], size["intermediate_size"]
    block = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden
    return int(size["num_hidden_layers"] * block + 2 * vocabulary(preset) * hidden + hidden)


def vocabulary(preset: str) -> int:
    """Return the rows of the embedding."""
    return int(PRESETS[preset]["vocab_size"])


def build(preset: str, seed: int, device: str = "cpu") -> LlamaForCausalLM:
    """Make the whole model in fp32, with the same weights on every rank.

    Args:
        preset: a key of :data:`PRESETS`.
        seed: of the initial weights.
        device: where the model is made. The same seed gives other weights on another device.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which tables need not wait

    settings = PRESETS[preset] | {"use_cache": False}
    settings |= {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(seed)
    with torch.device(device):
        model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**settings))
    model.train()
    return model


def groups(model: LlamaForCausalLM) -> list[list[nn.Module]]:
    """Cut the model into the groups that travel together, in the order of forward.

    The embedding, every block, and the last norm with the head: what torch's own examples of
    FSDP2 for language models do. Every contender that shards gets this very list.
    """
    blocks = [[layer] for layer in model.model.layers]
    return [[model.model.embed_tokens], *blocks, [model.model.norm, model.lm_head]]


def batches(preset: str, tokens: int, rank: int, seed: int) -> list[torch.Tensor]:
    """Draw the token batches of one rank.

    Returns:
        :data:`BATCHES` int64 tensors of shape ``(1, tokens)``, different on every rank.
    """
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    size = (1, tokens)
    return [torch.randint(vocabulary(preset), size, generator=generator) for _ in range(BATCHES)]
