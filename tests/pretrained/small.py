"""Small ``transformers`` models in folders, and what loading them on several ranks gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.corpus.gathering import wholes

LLAMA: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def save_llama(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str = "50GB",
    **config: Any,
) -> nn.Module:
    """Save a Llama with random weights to a folder, and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **config})).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model in full, those of no state dict included."""
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers()))
    return dict(zip(named, wholes(named.values()), strict=True))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two models have the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
