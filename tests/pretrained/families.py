"""Tiny configurations of many families of ``transformers``: one file for each in a folder.

A family is saved by ``save_pretrained``, which reverts the conversions of ``transformers`` 5: the
experts and projections that it fuses are in the files as they were published.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

_TEXT: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 48,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_T5: dict[str, Any] = {
    "vocab_size": 48,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "image_size": 16,
    "num_attention_heads": 4,
    "patch_size": 4,
    "num_labels": 5,
}
_EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Family:
    """A model to save, and one to load its files into.

    Attributes:
        saved: the ``AutoModel...`` class that is saved.
        loaded: the one that is loaded.
        config: settings of the configuration.
    """

    saved: str
    config: dict[str, Any] = field(default_factory=dict)
    loaded: str = ""


def _causal(**config: Any) -> Family:
    return Family("AutoModelForCausalLM", {**_DECODER, **config})


def _masked(**config: Any) -> Family:
    return Family("AutoModelForMaskedLM", {**_TEXT, **config})


def _seq2seq(**config: Any) -> Family:
    return Family("AutoModelForSeq2SeqLM", {**_SEQ2SEQ, **config})


def _vision(**config: Any) -> Family:
    return Family("AutoModelForImageClassification", {**_VISION, **config})


#: By model type; what stands behind a space is not part of it.
FAMILIES: dict[str, Family] = {
    "llama": _causal(),
    "llama tied": _causal(tie_word_embeddings=True),
    "mistral": _causal(sliding_window=4),
    "qwen2": _causal(),
    "qwen3": _causal(tie_word_embeddings=True),
    "gemma": _causal(),
    "gemma2": _causal(query_pre_attn_scalar=8, sliding_window=4),
    "gemma3_text": _causal(query_pre_attn_scalar=8, sliding_window=4),
    "phi": _causal(),
    "phi3": _causal(),
    "olmo2": _causal(),
    "stablelm": _causal(),
    "starcoder2": _causal(),
    "cohere": _causal(),
    "granite": _causal(),
    "smollm3": _causal(),
    "gpt2": Family(
        "AutoModelForCausalLM",
        {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "gpt_neox": _causal(),
    "gptj": Family(
        "AutoModelForCausalLM",
        {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"rotary_dim": 4},
    ),
    "opt": _causal(ffn_dim=40, word_embed_proj_dim=32),
    "bloom": Family(
        "AutoModelForCausalLM", {"vocab_size": 48, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "falcon": Family("AutoModelForCausalLM", _TEXT),
    "mamba": Family(
        "AutoModelForCausalLM",
        {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "mixtral": _causal(num_local_experts=3),
    "qwen2_moe": _causal(**_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": _causal(**_EXPERTS),
    "olmoe": _causal(num_experts=3, num_experts_per_tok=2),
    "deepseek_v3": _causal(
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        head_dim=4,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
    "bert": _masked(),
    "bert classification": Family(
        "AutoModelForMaskedLM", {**_TEXT}, loaded="AutoModelForSequenceClassification"
    ),
    "roberta": _masked(),
    "distilbert": Family(
        "AutoModelForMaskedLM",
        {"vocab_size": 48, "dim": 32, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    ),
    "albert": _masked(embedding_size=16),
    "electra": _masked(embedding_size=16),
    "deberta-v2": _masked(pos_att_type=["c2p", "p2c"], relative_attention=True),
    "mpnet": _masked(),
    "modernbert": _masked(cls_token_id=1, sep_token_id=2),
    "t5": Family("AutoModelForSeq2SeqLM", _T5),
    "t5 untied": Family(
        "AutoModelForSeq2SeqLM",
        {**_T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    ),
    "bart": _seq2seq(),
    "marian": _seq2seq(),
    "pegasus": _seq2seq(),
    "mbart": _seq2seq(),
    "vit": _vision(),
    "deit": _vision(architectures=["DeiTForImageClassification"]),
    "dinov2": _vision(),
    "beit": _vision(),
    "swin": Family(
        "AutoModelForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]}
        | {"num_heads": [2, 4], "window_size": 2, "num_labels": 5},
    ),
    "convnext": Family(
        "AutoModelForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 5},
    ),
    "resnet": Family(
        "AutoModelForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
        | {"layer_type": "basic"},
    ),
}


def save_family(name: str, folder: Path) -> None:
    """Save a family with random weights, of which none is what an initialization gives."""
    import transformers

    family = FAMILIES[name]
    kind = name.partition(" ")[0]
    config = transformers.AutoConfig.for_model(kind, **family.config)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, family.saved).from_config(config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.02)
    model.save_pretrained(folder)


def loss_of(model: nn.Module, name: str) -> torch.Tensor:
    """The model's own loss on a fixed batch."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(0)
    if "Image" in family.saved:
        size = family.config.get("image_size", 16)
        images = torch.randn(2, 3, size, size, generator=generator)
        loss: torch.Tensor = model(pixel_values=images, labels=torch.tensor([1, 3])).loss
        return loss
    tokens = torch.randint(3, 48, (2, 9), generator=generator)
    labels = torch.tensor([0, 1]) if family.loaded else tokens
    result: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return result
