"""``materialize`` and ``load_weights`` of ``transformers`` models, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise import fully_shard, materialize
from shardwise.checkpoint import load_weights
from tests.harness import run_ranks
from tests.pretrained.small import LLAMA, assert_same, full_tensors, save_llama
from tests.worlds import on_processes

pytest.importorskip("transformers")


def _sharded_on_meta(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    shardwise.wrap.apply_wrap(model, "auto", fully_shard)
    fully_shard(model)
    return model


@on_processes(2)
def test_materialize_initializes_as_the_model_would(rank: int, world_size: int) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    gpt2 = GPT2Config(n_layer=2, n_embd=12, n_head=2, vocab_size=20, n_positions=8)
    for config in (LlamaConfig(**LLAMA), gpt2):
        model = _sharded_on_meta(config)
        torch.manual_seed(7)
        materialize(model)
        torch.manual_seed(7)
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config)
        materialize(plain)
        assert_same(full_tensors(model), full_tensors(plain))
        torch.manual_seed(7)
        built = AutoModelForCausalLM.from_config(config)
        for each in (model, plain, built):
            each.train(False)
        found = full_tensors(built)
        # Modules draw numbers when they are built, too: only scales can be compared.
        for name, tensor in full_tensors(model).items():
            assert tensor.shape == found[name].shape
            assert tensor.mean().item() == pytest.approx(found[name].mean().item(), abs=0.02)
            if tensor.numel() > 100:
                assert tensor.std().item() == pytest.approx(found[name].std().item(), rel=0.25)


def _loads_by_hand(rank: int, world_size: int, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(8).view(1, 8)
    expected = plain(input_ids=tokens, labels=tokens).loss

    model = _sharded_on_meta(LlamaConfig(**LLAMA)).train(False)
    load_weights(folder, model)  # makes memory for what it reads
    left = [name for name, each in model.named_buffers() if each.is_meta]
    assert left == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    materialize(model)
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, expected)

    model = _sharded_on_meta(LlamaConfig(**LLAMA)).train(False)
    materialize(model, init=_nothing)
    load_weights(folder, model)
    with pytest.raises(RuntimeError, match=r"model\.rotary_emb\.inv_freq.*neither initialized"):
        model(input_ids=tokens, labels=tokens)
    for name, buffer in plain.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, expected)


def _nothing(module: nn.Module) -> None:
    pass


def test_load_weights_makes_memory_and_materialize_the_rest(tmp_path: Path) -> None:
    save_llama(tmp_path)
    run_ranks(_loads_by_hand, 2, tmp_path)
