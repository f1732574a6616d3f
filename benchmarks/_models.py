"""The models and batches that every contender trains: the same weights, the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BATCHES = 4
"""How many different batches a rank cycles through.

Few, so that the model memorises them and the loss falls within a benchmark: a contender that lost
a gradient on its way between ranks would then show another loss than its peers.
"""


@dataclass(frozen=True)
class Preset:
    """The size of a Llama with untied embeddings.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width inside the gated MLP.
        layers: number of transformer blocks.
        heads: attention heads (as many for keys and values).
        vocab: size of the vocabulary.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int

    @property
    def numel(self) -> int:
        """The number of parameters."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden


PRESETS = {
    "tiny": Preset(hidden=64, intermediate=176, layers=3, heads=4, vocab=256),  # 0.2 M: for tests
    "5m": Preset(hidden=256, intermediate=688, layers=5, heads=4, vocab=2048),  # 5.0 M
    "34m": Preset(hidden=512, intermediate=1376, layers=8, heads=8, vocab=8192),  # 33.7 M
    "150m": Preset(hidden=768, intermediate=2048, layers=14, heads=12, vocab=32000),  # 148.3 M
    "10m": Preset(hidden=320, intermediate=864, layers=6, heads=5, vocab=4096),  # 10.1 M
    "215m": Preset(hidden=896, intermediate=2464, layers=16, heads=14, vocab=32000),  # 214.7 M
    "400m": Preset(hidden=1152, intermediate=3200, layers=20, heads=18, vocab=32000),  # 401.1 M
    # For GPUs, the largest that fits.
    "1b": Preset(hidden=2048, intermediate=5632, layers=18, heads=16, vocab=32000),  # 1.06 B
    "3b": Preset(hidden=3072, intermediate=8192, layers=24, heads=24, vocab=32000),  # 2.9 B
    "6b": Preset(hidden=4096, intermediate=11008, layers=30, heads=32, vocab=32000),  # 6.3 B
}


def build(preset: str, seed: int, device: str = "cpu") -> LlamaForCausalLM:
    """Make the whole model in fp32, with the same weights on every rank.

    Args:
        preset: a key of :data:`PRESETS`.
        seed: of the initial weights.
        device: where the model is made. The same seed gives other weights on another device.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which tables need not wait

    size = PRESETS[preset]
    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model: LlamaForCausalLM = LlamaForCausalLM(config)
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
    vocab = PRESETS[preset].vocab
    return [torch.randint(vocab, (1, tokens), generator=generator) for _ in range(BATCHES)]
