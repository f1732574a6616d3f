"""``transformers``' own way to FSDP: ``from_pretrained(..., distributed_config=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from tests.ecosystem.llama import assert_equal, tiny_llama, tokens, train
from tests.worlds import Ranks

distributed = pytest.importorskip(
    "transformers.distributed", reason="needs transformers>=5.20: install .[ecosystem]"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what others warn of is theirs
    pytest.mark.skipif(
        not hasattr(distributed.DistributedConfig(), "fsdp_size"),
        reason="this transformers has no DistributedConfig(fsdp_size=...): install .[ecosystem]",
    ),
]


STEPS = 2


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with shardwise.patch_torch():
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2), attn_implementation="eager"
        )


def _trained(rank: int, world_size: int, folder: Path, tied: bool) -> None:
    model, twin = _load(folder), tiny_llama(tied)
    assert isinstance(model, shardwise.FSDPModule)
    for module in (model, *model.model.layers):
        assert shardwise.fully_shard.state(module).groups is not None
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_equal(model, twin)
    for each, batches in (
        (model, lambda step: tokens(world_size, step)[rank]),
        (twin, lambda step: tokens(world_size, step)),
    ):
        train(each, torch.optim.AdamW(each.parameters(), lr=1e-2), batches, STEPS)
    assert_equal(model, twin)
    saved = folder / "saved"
    model.save_pretrained(saved)
    torch.distributed.barrier()
    assert_equal(type(twin).from_pretrained(saved), twin)
    assert_equal(_load(saved), twin)
    shards = folder / "shards"
    model.save_pretrained(shards, distributed_checkpoint=True)
    assert_equal(_load(shards), twin)


def _both(rank: int, world_size: int, folder: Path) -> None:
    for name, tied in (("plain", False), ("tied", True)):
        _trained(rank, world_size, folder / name, tied)


def test_a_model_that_transformers_sharded_trains_and_is_saved(
    ranks: Ranks, tmp_path: Path
) -> None:
    for name, tied in (("plain", False), ("tied", True)):
        tiny_llama(tied).save_pretrained(tmp_path / name)
    ranks(_both, 2, tmp_path)
