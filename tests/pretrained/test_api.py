"""``from_pretrained`` on several ranks, beside that of ``transformers`` on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardwise
from tests.harness import run_ranks
from tests.pretrained.small import assert_same, full_tensors, save_llama

pytest.importorskip("transformers")


def _loads_as_unsharded(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = shardwise.from_pretrained(folder, **options)
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert isinstance(model, type(plain))
    assert not model.training
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert len(model.state_dict()) == len(plain.state_dict())
    assert_same(full_tensors(model), full_tensors(plain))
    tokens = torch.arange(12).view(2, 6)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, plain)]
    assert torch.equal(*losses)
    assert isinstance(model.model.layers[0], shardwise.FSDPModule)


@pytest.mark.parametrize(
    ("saved", "options"),
    [
        ({}, {}),
        ({"tie_word_embeddings": True, "max_shard_size": 4000}, {}),
        ({"dtype": torch.bfloat16}, {}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.float32}),
        ({}, {"dtype": "bfloat16"}),
    ],
    ids=["plain", "tied-many-files", "bf16", "bf16-as-fp32", "fp32-as-bf16"],
)
def test_a_model_is_loaded_as_unsharded(
    tmp_path: Path, saved: dict[str, Any], options: dict[str, Any]
) -> None:
    save_llama(tmp_path, **saved)
    run_ranks(_loads_as_unsharded, 2, tmp_path, options)
