"""A model of texts and images of transformers, whose vision tower runs on some ranks only."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import fully_shard
from tests.corpus.gathering import whole_parameters
from tests.corpus.instruments import run

pytestmark = pytest.mark.usefixtures("memory_in_any_order")

IMAGE_TOKEN = 31
PATCHES = 4


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**small, num_hidden_layers=2, image_size=8, patch_size=4)
    text = LlamaConfig(**small, num_hidden_layers=2, num_key_value_heads=2, vocab_size=32)
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )
    return Llava(config)


def batch(step: int, rank: int) -> dict[str, Any] | None:
    """Return a batch: with an image, without one, or none at all."""
    draw = random.Random(100 * step + rank)
    made = torch.Generator().manual_seed(100 * step + rank)
    kind = draw.choice(["image", "text", "text", "none"])
    if kind == "none":
        return None
    ids = torch.randint(0, IMAGE_TOKEN, (1, 8), generator=made)
    found: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if kind == "image":
        ids[:, 1 : 1 + PATCHES] = IMAGE_TOKEN
        found["pixel_values"] = torch.randn(1, 3, 8, 8, generator=made)
    return found


def train(rank: int, world_size: int, steps: int) -> dict[str, torch.Tensor]:
    model = llava()
    tower, decoder = model.model.vision_tower, model.model.language_model
    for layer in (*tower.encoder.layers, *decoder.layers):
        fully_shard(layer)
    fully_shard(model, order="own")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        found = batch(step, dist.get_rank())
        if found is None:
            model.skip_step()
        else:
            model(**found).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


def expected(world_size: int, steps: int) -> dict[str, torch.Tensor]:
    model = llava()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        for rank in range(world_size):
            found = batch(step, rank)
            if found is not None:
                (model(**found).loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: copy.copy(param.detach()) for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("instrument", "world_size", "steps"), [("threads", 2, 10), ("threads", 3, 10), ("shm", 2, 10)]
)
def test_text_only_batches_need_no_dummy_image(
    instrument: str, world_size: int, steps: int
) -> None:
    found = run(instrument, train, world_size, steps)[0]
    for name, value in expected(world_size, steps).items():
        if world_size == 2:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
