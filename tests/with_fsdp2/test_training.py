"""Our optimizers, loading and planning for models that torch's own FSDP2 shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise.optim import Adafactor, AdamW8bit, Lion, Muon, muon_groups, offload
from tests.threads import run_threads
from tests.with_fsdp2.models import WAYS, Way, full, shard, train

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW8bit": lambda model: AdamW8bit(model.parameters(), lr=0.01),
    "Lion": lambda model: Lion(model.parameters(), lr=0.01),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.01),
    "Muon": lambda model: Muon(muon_groups(model), lr=0.01),
    "offload": lambda model: offload(torch.optim.AdamW(model.parameters(), lr=0.01), "host"),
}


def _optimized(rank: int, world_size: int, way: Way, name: str) -> None:
    torchs, ours = shard(way), shard(way, with_=shardwise.fully_shard)
    losses = [train(each, OPTIMIZERS[name](each), rank, range(3)) for each in (torchs, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2 if way.param_dtype else 1e-5)
    for (key, one), other in zip(full(torchs).items(), full(ours).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-3, msg=key)


def _pairs() -> list[Any]:
    """Two ways for each optimizer, and two optimizers for each way; the others are long."""
    return [
        pytest.param(
            way, name, id=f"{name}-{of}", marks=[pytest.mark.long] * ((i - j) % len(WAYS) > 1)
        )
        for i, name in enumerate(OPTIMIZERS)
        for j, (of, way) in enumerate(WAYS.items())
    ]


@pytest.mark.parametrize(("way", "name"), _pairs())
def test_optimizers_train_as_on_our_runtime(way: Way, name: str) -> None:
    run_threads(_optimized, 2 if len(way.shape) == 1 else 4, way, name)


# -- models of transformers ------------------------------------------------------------------------

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _loaded(rank: int, world_size: int, folder: Path, tied: bool, dtype: Any) -> None:
    model: Any = shardwise.from_pretrained(folder / "plain", shard=fully_shard, param_dtype=dtype)
    whole: Any = LlamaForCausalLM.from_pretrained(folder / "plain")
    for name, param in whole.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name
    tokens = torch.arange(12).view(2, 6)
    found, wanted = model(tokens).logits, whole(tokens).logits
    torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-2 if dtype else 1e-5)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    shardwise.save_pretrained(model, folder / "saved")
    again: Any = LlamaForCausalLM.from_pretrained(folder / "saved")
    for name, param in again.named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), param), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_models_of_transformers_load_into_torchs_shards(
    tmp_path: Path, tied: bool, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG, tie_word_embeddings=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    run_threads(_loaded, 2, tmp_path, tied, dtype)


# -- what readers in other processes get -----------------------------------------------------------


def _published(rank: int, world_size: int, way: Way, name: str) -> None:
    model = shard(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with shardwise.publish(model, name) as weights:
        for step in range(2):
            train(model, optimizer, rank, range(step, step + 1))
            weights.update()
            wanted = full(model)
            seen = dict(shardwise.subscribe(name))
            assert set(seen) == set(wanted)
            for key, value in seen.items():
                assert torch.equal(value, wanted[key].to(value.dtype)), key
            dist.barrier()  # the name goes with the first rank that leaves


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_weights_are_published(way: Way, tmp_path: Path) -> None:
    run_threads(_published, 2 if len(way.shape) == 1 else 4, way, f"with-fsdp2-{tmp_path.name}")
