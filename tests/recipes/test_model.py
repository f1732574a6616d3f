"""What MFU is made of: operations of a token, and peaks of devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.app.recipes.core.model import (
    Utilization,
    build,
    flops_per_token,
    next_token_loss,
)
from shardwise.app.recipes.text.config import with_microbatches
from shardwise.app.recipes.text.data import SEPARATOR, VOCAB_SIZE
from shardwise.insight.schema.option import OptionError
from tests.recipes.small import MODEL, small_config


@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_a_token_are_those_that_torch_counts(tied: bool) -> None:
    settings = {**MODEL, "attention_dropout": 0.0, "tie_word_embeddings": tied}
    settings["attn_implementation"] = "eager"  # of which the counter sees every product
    length = 32
    model = build(settings, VOCAB_SIZE, SEPARATOR).to_empty(device="cpu")
    model.train()
    with FlopCounterMode(display=False) as counter:
        next_token_loss(model, torch.zeros(2, length + 1, dtype=torch.int64)).backward()
    counted = counter.get_total_flops() / (2 * length)
    # Norms are parameters, and no products.
    assert flops_per_token(model, length) == pytest.approx(counted, rel=0.01)


def test_mfu_is_not_known_on_a_cpu_unless_its_peak_is_given() -> None:
    model = build(MODEL, VOCAB_SIZE, SEPARATOR)
    unknown = Utilization.of(model, 16, torch.device("cpu"), None)
    assert unknown.peak_tokens_per_s(2) is None
    assert "MFU needs --peak-flops on CPUs" in str(unknown)
    given = Utilization.of(model, 16, torch.device("cpu"), 1e12)
    assert given.peak_tokens_per_s(2) == 2e12 / flops_per_token(model, 16)
    assert "MFU of 1 TFLOP/s per rank, as --peak-flops says" in str(given)


def test_microbatches_follow_from_the_tokens_of_a_step(tmp_path: Path) -> None:
    config = dataclasses.replace(small_config(tmp_path, batch_size=4), batch_tokens=24 * 16)
    for world, size, microbatches in ((1, 4, 6), (2, 4, 3), (3, 4, 2), (4, 3, 2), (8, 3, 1)):
        train = with_microbatches(config, world).train
        assert (train.batch_size, train.accumulate) == (size, microbatches), f"{world} ranks"
        assert train.examples_per_step(world) == 24
    train = dataclasses.replace(config.train, batch_size=10**30)
    vast = dataclasses.replace(config, train=train)
    assert with_microbatches(vast, 1).train.accumulate == 1, "at once, however large the limit"
    with pytest.raises(OptionError, match=r"found 384, expected a multiple of 80.* such as 400"):
        with_microbatches(config, 5)
