"""The policy ``"auto"`` finds the blocks that a reader of a model would name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardwise.wrap import chosen_modules, repeated_blocks

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
TEXT: dict[str, Any] = {**SMALL, "vocab_size": 640, "num_key_value_heads": 2}


def _of(config_class: str, model_class: str, **config: Any) -> nn.Module:
    with torch.device("meta"):
        made = getattr(transformers, config_class)(**config)
        return getattr(transformers, model_class)(made)


def _layers(*prefixes: str, count: int = 3) -> list[str]:
    return [f"{prefix}.{index}" for prefix in prefixes for index in range(count)]


TRANSFORMERS = {
    "llama": (
        lambda: _of("LlamaConfig", "LlamaForCausalLM", **TEXT),
        _layers("model.layers"),
    ),
    "gpt-2": (
        lambda: _of("GPT2Config", "GPT2LMHeadModel", n_embd=16, n_layer=3, n_head=2),
        _layers("transformer.h"),
    ),
    "bert": (
        lambda: _of("BertConfig", "BertForMaskedLM", **SMALL),
        _layers("bert.encoder.layer"),
    ),
    "t5": (
        lambda: _of(
            "T5Config", "T5ForConditionalGeneration", d_model=16, d_kv=8, d_ff=32, num_layers=3
        ),
        _layers("encoder.block", "decoder.block"),
    ),
    "vit": (
        lambda: _of("ViTConfig", "ViTForImageClassification", image_size=32, **SMALL),
        _layers("vit.layers"),
    ),
    "mixtral": (
        lambda: _of("MixtralConfig", "MixtralForCausalLM", num_local_experts=4, **TEXT),
        _layers("model.layers"),
    ),
    "whisper": (
        lambda: _of(
            "WhisperConfig", "WhisperModel", d_model=24, encoder_layers=3, decoder_layers=3
        ),
        _layers("encoder.layers", "decoder.layers"),
    ),
    "swin": (
        lambda: _of("SwinConfig", "SwinModel", embed_dim=8, depths=[3, 3], num_heads=[2, 2]),
        _layers("encoder.layers.0.blocks", "encoder.layers.1.blocks"),
    ),
    "resnet": (
        lambda: _of(
            "ResNetConfig",
            "ResNetForImageClassification",
            hidden_sizes=[8, 16],
            depths=[3, 3],
            embedding_size=8,
        ),
        _layers("resnet.encoder.stages.0.layers", "resnet.encoder.stages.1.layers"),
    ),
}


def _names(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in repeated_blocks(model)]


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_models_of_transformers(family: str) -> None:
    make, expected = TRANSFORMERS[family]

    assert _names(make()) == expected


class Bottleneck(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.ReLU())


class ResidualNet(nn.Module):
    """As torchvision has it: parts by name, each a sequence of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7)
        self.layer1 = nn.Sequential(Bottleneck(), Bottleneck())
        self.layer2 = nn.Sequential(Bottleneck(), Bottleneck())
        self.head = nn.Linear(4, 10)


class Mixture(nn.Module):
    """A layer whose experts are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(4)
        )


class Heads(nn.Module):
    """A layer whose attention heads are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleDict({"query": nn.Linear(8, 2), "key": nn.Linear(8, 2)}) for _ in range(4)
        )
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


class Pair(nn.Module):
    """Attention and a perceptron, in bare lists of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.MultiheadAttention(8, 2), nn.Linear(8, 8)]) for _ in range(2)
        )


class Named(nn.Module):
    """Blocks that are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bottleneck(), Bottleneck()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ResidualNet(), ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
        (nn.ModuleDict({"a": Mixture(), "b": Mixture()}), ["a", "b"]),
        (nn.Sequential(Heads(), Heads()), ["0", "1"]),
        (Pair(), ["layers.0.0", "layers.1.0"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), ["0", "2"]),
        (nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(2)]), ["0", "1"]),
        (nn.Sequential(Bottleneck(), nn.Linear(2, 2)), ["0.0", "0.2"]),
        (nn.Linear(2, 2), []),
    ],
    ids=["resnet", "experts", "heads", "lists", "linears", "layers", "once", "leaf"],
)
def test_other_models(model: nn.Module, expected: list[str]) -> None:
    assert _names(model) == expected


def test_blocks_that_are_attributes() -> None:
    assert _names(Named()) == ["first", "second"]


def test_a_models_own_plan_is_taken_as_it_is() -> None:
    model = _of("LlamaConfig", "LlamaForCausalLM", **TEXT)
    names = {module: name for name, module in model.named_modules()}

    chosen = {
        names[m]: arguments for m, arguments in chosen_modules(model, model.fsdp_plan).items()
    }

    keep = {"reshard_after_forward": False}
    assert chosen == {
        "model.embed_tokens": {},
        "model.layers.0": {},
        "model.layers.1": {},
        "model.layers.2": {},
        "model.norm": keep,
        "lm_head": keep,
    }
