"""Adapters above a base in four bits: the same values on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise import checkpoint, fully_shard
from shardwise.base.errors import CheckpointError
from shardwise.pretrained.api import AdapterForm, saved_pretrained
from shardwise.pretrained.building import build
from shardwise.pretrained.filling import fill
from shardwise.pretrained.four_bits import (
    FourBitLinear,
    four_bit_layers,
    store_in_four_bits,
    unpacked,
)
from shardwise.pretrained.lora import add_adapters, initialize_adapters, plain_names
from tests.ecosystem.llama import full, loss_of, tokens
from tests.harness import run_ranks

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: install .[nf4]")
pytest.importorskip("peft", reason="needs peft: install .[ecosystem]")

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs

STEPS = 3


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """A published model whose rows are whole blocks, except those of one layer of each block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=96,  # of down_proj, whose rows are no whole blocks
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_bias=True,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.normal_()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def _make(base: Path, shards: bool, seed: int = 5) -> Any:
    from peft import LoraConfig

    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = add_adapters(build(base).train(), config)
    store_in_four_bits(model)
    if shards:
        for block in model.base_model.model.model.layers:
            fully_shard(block)
        fully_shard(model)
    initialize_adapters(model)
    fill(model, base, names=plain_names(model))
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)


def _train(model: Any, optimizer: torch.optim.Optimizer, batches: Any, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        for batch in (found := batches(step)):
            (loss_of(model, batch) / len(found)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _same(found: nn.Module, expected: nn.Module, error: float) -> None:
    values = dict(found.named_parameters())
    for name, wanted in expected.named_parameters():
        mine, its = full(values[name]), wanted.detach()
        assert mine.dtype == its.dtype
        if its.is_floating_point():
            assert (mine - its).abs().max() <= error, name
        else:
            assert torch.equal(mine, its), name


def _trains(rank: int, world_size: int, base: Path) -> None:
    model, twin = _make(base, True), _make(base, False)
    _same(model, twin, 0)
    optimizer, its = _optimizer(model), _optimizer(twin)
    _train(model, optimizer, lambda step: tokens(world_size, step)[rank : rank + 1])
    _train(twin, its, lambda step: tokens(world_size, step))
    _same(model, twin, 1e-6)
    folder = base.parent / "saved"
    checkpoint.save(folder, model, optimizer, ignore_frozen_params=True)
    other = _make(base, True, seed=6)
    its_own = _optimizer(other)
    checkpoint.load(folder, other, its_own, ignore_frozen_params=True)
    _train(other, its_own, lambda step: tokens(world_size, step)[rank : rank + 1], STEPS)
    _train(twin, its, lambda step: tokens(world_size, step), STEPS)
    _same(other, twin, 1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_adapters_train_as_on_an_unsharded_model(base: Path, ranks: int) -> None:
    run_ranks(_trains, ranks, base)


def test_the_layers_of_blocks_are_replaced(base: Path) -> None:
    model = _make(base, False)
    found = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in four_bit_layers(model)}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert names
    assert all("lora" in name for name in names)


def test_values_and_gradients_are_those_of_the_unpacked_weight() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 6).requires_grad_(False)
    layer = FourBitLinear(linear).to_empty(device="cpu")
    layer.bias = linear.bias
    layer.pack(linear.weight)
    weight = unpacked(layer.codes, layer.scales, torch.float32)
    error = (weight - linear.weight).norm() / linear.weight.norm()
    assert 0.05 < error < 0.15  # as four bits allow
    one, other = (torch.randn(2, 5, 128).requires_grad_() for _ in range(2))
    other.data.copy_(one.detach())
    found, expected = layer(one), F.linear(other, weight, linear.bias)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad, other.grad)


def test_adapters_are_not_merged_into_four_bits(base: Path) -> None:
    with pytest.raises(CheckpointError, match="found a weight in four bits"):
        saved_pretrained(_make(base, False), AdapterForm.MERGED)


def test_a_base_that_lacks_a_weight_is_refused(base: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = base / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"found no model\.layers\.1\.self_attn\.q_proj"):
        _make(base, False)
