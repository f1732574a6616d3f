"""Muon gets the matrices of hidden layers, AdamW everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from shardwise.optim import muon_groups

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _llama(tied: bool) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=12, tie_word_embeddings=tied))


def _split(model: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """The names of a model's parameters for Muon, for AdamW with decay, and without."""
    found: dict[str, list[str]] = {"muon": [], "decayed": [], "rest": []}
    for group in muon_groups(model, muon={"weight_decay": 0.1}, adamw={"weight_decay": 0.2}):
        names = [name for name, _ in group["params"]]
        if group["algorithm"] == "muon":
            found["muon"] = names
        else:
            found["decayed" if group["weight_decay"] == 0.2 else "rest"] = names
    return found["muon"], found["decayed"], found["rest"]


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tied: bool) -> None:
    muon, decayed, rest = _split(_llama(tied))
    assert {name.rpartition("layers.0.")[2] for name in muon} == {
        *(f"self_attn.{each}_proj.weight" for each in "qkvo"),
        *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
    }
    assert decayed == ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    assert all("norm" in name for name in rest)
    assert len(rest) == 3


def test_gpt2() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=12, n_positions=4))
    muon, decayed, _ = _split(model)
    assert [name.removeprefix("transformer.h.0.") for name in muon] == [
        *("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    ]
    assert decayed == ["transformer.wte.weight", "transformer.wpe.weight"]


def test_vit() -> None:
    model = ViTForImageClassification(ViTConfig(**TINY, image_size=4, patch_size=2, num_labels=3))
    muon, decayed, _ = _split(model)
    assert len(muon) == 6
    assert all(".layer.0." in name or ".layers.0." in name for name in muon)
    assert {name.rpartition(".")[0].rpartition(".")[2] or name for name in decayed} >= {
        *("classifier", "projection")
    }
    assert any("cls_token" in name for name in decayed)
    assert any("position_embeddings" in name for name in decayed)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 8, 16))
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.conv = nn.Conv2d(3, 8, 2)


def test_experts_are_stacks_of_matrices_and_filters_are_not() -> None:
    assert _split(_Experts()) == (["gate_up_proj"], ["conv.weight"], ["conv.bias"])


def test_a_function_decides_if_there_is_one() -> None:
    groups = muon_groups(_Experts(), is_hidden=lambda name, param: name == "conv.weight")
    assert [name for name, _ in groups[0]["params"]] == ["conv.weight"]


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of Linear that requires a gradient"):
        muon_groups(nn.Linear(2, 2).requires_grad_(False))
