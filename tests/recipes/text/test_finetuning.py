"""Fine-tuning over ranks has the losses of a plain loop of ``transformers`` on the same batches."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardwise.app.recipes.core.batches import Shuffled
from shardwise.app.recipes.text.chat import ChatData, ChatEncoder
from shardwise.app.recipes.text.config import LmConfig, Packing
from shardwise.app.recipes.text.conversations import (
    ChatRows,
    Survey,
    TargetBatch,
    target_loss,
)
from shardwise.app.recipes.text.data import Tokenizer
from shardwise.app.recipes.text.documents import Documents, StreamSource
from shardwise.app.recipes.text.streams import StreamBatches
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import convert
from shardwise.elastic.world import World
from shardwise.insight.schema.training import Existing
from tests.recipes.running import as_after, train
from tests.recipes.small import losses, validation
from tests.recipes.text.plain import BatchOf, plain_losses, tuned
from tests.recipes.text.published import chats, write_lines
from tests.worlds import Ranks


def chatting(folder: Path, published: Path, out: str, **changes: Any) -> LmConfig:
    """Fine-tuning on chats."""
    chat = (str(published / "chats.jsonl"),)
    return tuned(folder, published / "model", out, chat=chat, **changes)


def chat_rows(config: LmConfig) -> ChatRows:
    """The rows of chats, made in one process."""
    text = config.check(World(0, 1, 0, 1)).text
    assert isinstance(text, ChatData)
    assert config.pretrained is not None
    encoder = ChatEncoder(Tokenizer(config.pretrained))
    found = Survey()
    for index in range(len(text.train)):
        found.add(index, encoder.documents(text.train.read(index), "here"), config.seq_length)
    return ChatRows(text.train, encoder, found, config.seq_length, config.packing)


def chat_batches(config: LmConfig, world_size: int) -> BatchOf:
    """The batches of chats of any rank."""
    rows = chat_rows(config)
    batches = Shuffled(len(rows), config.train.seed, rows.drawn)
    size = config.train.batch_size

    def batch_of(step: int, micro: int, rank: int) -> TargetBatch:
        microbatch = (step - 1) * config.train.accumulate + micro
        return batches.batch((microbatch * world_size + rank) * size, size)

    return batch_of


def text_batches(config: LmConfig, world_size: int) -> BatchOf:
    """The batches of documents of any rank, asked for in their order."""
    text = config.check(World(0, world_size, 0, world_size)).text
    assert isinstance(text, Documents)
    assert config.pretrained is not None
    source, vocabulary = StreamSource(text), Tokenizer(config.pretrained)
    of_ranks = [
        StreamBatches(source, vocabulary, config.seq_length, None, World(r, world_size, r, 1))
        for r in range(world_size)
    ]
    size = config.train.batch_size

    def batch_of(step: int, micro: int, rank: int) -> TargetBatch:
        microbatch = (step - 1) * config.train.accumulate + micro
        rows = of_ranks[rank].batch((microbatch * world_size + rank) * size, size)
        return TargetBatch(rows[:, :-1], rows[:, 1:].contiguous(), None)

    return batch_of


def test_two_ranks_have_the_losses_of_one_process_bit_for_bit(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    make = functools.partial(chatting, tmp_path, published)
    configs = [
        make("packed"),
        make("packed-accumulated", accumulate=2),
        make("padded", packing=Packing.PADDED, accumulate=2),
    ]
    ranks(train, 2, *configs)
    for config in configs:
        expected = plain_losses(config, 2, chat_batches(config, 2))
        assert [loss for _, loss, _ in losses(config)] == expected, config.train.output.out.name


# Each world once, and each packing; the other pairs are long.
@pytest.mark.parametrize(
    ("world_size", "packing"),
    [
        (1, Packing.PADDED),
        (4, Packing.PACKED),
        pytest.param(1, Packing.PACKED, marks=pytest.mark.long),
        pytest.param(4, Packing.PADDED, marks=pytest.mark.long),
    ],
)
def test_other_worlds_have_them_within_rounding(
    ranks: Ranks, tmp_path: Path, published: Path, world_size: int, packing: Packing
) -> None:
    accumulate = 2 if packing is Packing.PADDED else 1
    given = {"batch_size": 4 // world_size, "packing": packing, "accumulate": accumulate}
    config = chatting(tmp_path, published, "run", **given)
    ranks(train, world_size, config)
    expected = plain_losses(config, world_size, chat_batches(config, world_size))
    assert [loss for _, loss, _ in losses(config)] == pytest.approx(expected, rel=1e-5)


def test_continued_pretraining_has_the_losses_of_one_process(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    data = (str(published / "texts.jsonl"),)
    # A power of two: the mean of each microbatch is then the sum over all tokens, divided.
    config = tuned(tmp_path, published / "model", "run", data=data, seq_length=32, accumulate=2)
    ranks(train, 2, config)
    expected = plain_losses(config, 2, text_batches(config, 2))
    assert [loss for _, loss, _ in losses(config)] == expected


def test_a_fine_tuning_that_was_stopped_goes_on_exactly(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    make = functools.partial(
        chatting, tmp_path, published, checkpoint_every=2, accumulate=2, batch_size=2
    )
    whole = make("whole")
    ranks(train, 2, whole)
    for world_size, batch_size in ((2, 2), (4, 1)):
        again = make(f"over-{world_size}", batch_size=batch_size, existing=Existing.RESUME)
        as_after(2, whole, again)
        ranks(train, world_size, again)
        assert [s["from_step"] for s in again.files.read()["sessions"]] == [0, 2]
        if world_size == 2:
            assert losses(again) == losses(whole)
            assert validation(again) == validation(whole)
        for mine, expected in zip(losses(again), losses(whole), strict=True):
            assert mine == pytest.approx(expected, rel=1e-5)


def test_an_epoch_has_every_chat_once_and_another_run_goes_on_from_the_weights(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    few = (str(write_lines(tmp_path / "chats.jsonl", chats(30))),)
    make = functools.partial(tuned, tmp_path, published / "model", chat=few)
    config = make("first", steps=None, epochs=2, eval_every=4)
    ranks(train, 2, config)
    record = config.files.read()
    rows = len(chat_rows(config))
    steps = -(-2 * rows // 4)
    assert [step for step, _, _ in losses(config)] == list(range(1, steps + 1))
    assert [step for step, _ in validation(config)] == [*range(4, steps, 4), steps]
    assert record["sessions"][-1]["status"] == "finished"
    longer = make("first", steps=None, epochs=3, existing=Existing.RESUME)
    ranks(train, 4, longer)
    assert longer.files.read()["sessions"][-1]["from_step"] == steps
    assert len(losses(longer)) == steps + -(-(3 * rows - 4 * steps) // 8)

    run = config.train.output.out
    newest = max((run / "checkpoints").iterdir())
    second = [
        tuned(tmp_path, folder, name, chat=few, steps=1, lr=1e-12)
        for name, folder in (("of-run", run), ("of-step", newest))
    ]
    ranks(train, 2, *second)
    for config in second:
        [(_, found)] = validation(config)
        assert found == pytest.approx(validation(longer)[-1][1], rel=1e-5)


def test_what_comes_out_loads_in_transformers_alone_and_generates_as_before(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(published / "model", model)
    generation = model / "generation_config.json"
    settings = {**json.loads(generation.read_text()), "eos_token_id": [0, 1], "max_new_tokens": 3}
    generation.write_text(json.dumps(settings))
    chat = (str(published / "chats.jsonl"),)
    run = tuned(tmp_path, model, "run", chat=chat, steps=2)
    ranks(train, 2, run)
    convert(run.train.output.out, tmp_path / "out", Format.HF)
    tuned_model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    found = tuned_model.generation_config
    assert (found.eos_token_id, found.max_new_tokens) == ([0, 1], 3)
    assert tuned_model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    before = AutoTokenizer.from_pretrained(model)
    message = [{"role": "user", "content": "1 2"}]
    assert tokenizer.apply_chat_template(message) == before.apply_chat_template(message)
    assert tokenizer.get_vocab() == before.get_vocab()
    tokens = torch.tensor([before("rank 1")["input_ids"]])
    assert tuned_model.generate(tokens).shape[1] <= tokens.shape[1] + 3
    first = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        assert not torch.equal(tuned_model(tokens).logits, first(tokens).logits), "it was trained"


def test_an_evaluation_is_the_mean_over_the_targets_of_all_ranks(
    ranks: Ranks, tmp_path: Path, published: Path
) -> None:
    held = write_lines(tmp_path / "held.jsonl", chats(9, seed=5))
    config = chatting(
        tmp_path, published, "run", steps=1, lr=1e-12, eval_data=(str(held),), batch_size=2
    )
    ranks(train, 2, config)
    # A learning rate of next to nothing: the loss of the model as it was published.
    alone = dataclasses.replace(config, chat=(str(held),), eval_data=(str(held),))
    batches = chat_batches(alone, 1)
    model = AutoModelForCausalLM.from_pretrained(
        published / "model", dtype=torch.float32, use_cache=False
    )
    total, count = 0.0, 0
    assert config.files.read()["data"]["validation_chats"] == 9
    seen = set[tuple[int, ...]]()
    with torch.no_grad():
        for step in range(1, 20):
            for row in range(2):
                each = batches(step, 0, 0)
                one = TargetBatch(
                    each.tokens[row : row + 1],
                    each.targets[row : row + 1],
                    None if each.positions is None else each.positions[row : row + 1],
                )
                key = tuple(one.tokens.flatten().tolist())
                if key not in seen:
                    seen.add(key)
                    total += target_loss(model, one).item()
                    count += one.target_count
    assert validation(config) == [(1, pytest.approx(total / count, rel=1e-5))]
