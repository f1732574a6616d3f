"""What ``--from`` accepts, and what it says about folders that something is missing of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.text.config import FOR_PRETRAINED, LmConfig
from shardwise.app.recipes.text.published import find_pretrained
from shardwise.base.errors import UserError
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from tests.recipes.running import train_here, warning_in
from tests.recipes.small import losses
from tests.recipes.text.plain import tuned
from tests.recipes.text.published import chats, make_model, make_tokenizer, publish, write_lines
from tests.worlds import Ranks

ALONE = World(0, 1, 0, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A published model, and chats in the folder above it."""
    write_lines(tmp_path / "chats.jsonl", chats(30))
    return publish(tmp_path / "model")


def test_a_folder_with_weights_is_found_and_decides_the_defaults(folder: Path) -> None:
    assert find_pretrained(str(folder))["hidden_size"] == 24
    config = LmConfig.for_pretrained(str(folder))
    assert (config.pretrained, config.tokenizer_name) == (str(folder), str(folder))
    assert config.seq_length == 128, "no more than the model has positions"
    assert config.train.optimizer.lr == FOR_PRETRAINED.lr
    assert config.prompt_text == ""


def test_folders_that_lack_something_are_refused(folder: Path, tmp_path: Path) -> None:
    def reason() -> str:
        with pytest.raises(OptionError) as refused:
            find_pretrained(str(folder))
        return str(refused.value).replace(str(folder), "it")

    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    assert (
        reason() == "--from: found it without config.json, expected the model's configuration in it"
    )
    (folder / "config.json").write_text("{")
    assert reason().startswith("--from: found it/config.json, no JSON")
    (folder / "config.json").write_text(config)
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00003.safetensors")
    named = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(named)}}))
    assert reason() == (
        "--from: found it without model-00002-of-00003.safetensors and 1 more, of the 3 files that "
        "model.safetensors.index.json names, expected a folder with all files of a model"
    )
    (folder / named[0]).rename(weights)
    find_pretrained(str(folder))  # the single file wins over an index, as in transformers
    weights.rename(folder / named[0])
    index.write_text("[" * 3)
    assert "model.safetensors.index.json: is not valid JSON" in reason()
    index.unlink()
    (folder / named[0]).rename(folder / "pytorch_model.bin")
    assert "with weights in pytorch_model.bin and none in .safetensors files" in reason()
    (folder / "pytorch_model.bin").unlink()
    assert reason().startswith("--from: found it without weights")
    with pytest.raises(OptionError, match=r"--from: found .*chats.jsonl, a file"):
        find_pretrained(str(tmp_path / "chats.jsonl"))
    with pytest.raises(UserError, match="--from: no/such/folder: found nothing there, expected"):
        find_pretrained("no/such/folder")


def check(folder: Path, **changes: Any) -> None:
    tuned(folder.parent, folder, "run", **changes).check(ALONE)


def test_options_that_contradict_each_other_are_refused(folder: Path) -> None:
    chat = (str(folder.parent / "chats.jsonl"),)
    with pytest.raises(OptionError, match="--model: found llama-34m with --from"):
        dataclasses.replace(tuned(folder.parent, folder, "run"), model="llama-34m").check(ALONE)
    with pytest.raises(OptionError, match="--data: found --chat too, expected one of the two"):
        check(folder, chat=chat, data=chat)
    with pytest.raises(OptionError, match="--streams: found 4"):
        check(folder, chat=chat, streams=4)
    scratch = tuned(folder.parent, folder, "run", chat=chat)
    scratch = dataclasses.replace(scratch, pretrained=None, model="llama-tiny")
    with pytest.raises(OptionError, match="--chat: found no tokenizer, expected --from a model"):
        scratch.check(ALONE)
    with pytest.raises(OptionError, match="--seq-length: found 129, expected at most 128"):
        check(folder, chat=chat, seq_length=129)


def assembled(rank: int, world_size: int, *configs: LmConfig) -> list[str]:
    """What keeps trainings from beginning."""
    told = []
    world = World(rank, world_size, rank, world_size)
    for config in configs:
        try:
            train_here(config.check(world), world)
        except UserError as error:
            told.append(str(error))
        else:
            told.append("began")
    return told


def test_what_ranks_find_out_is_said_by_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    publish(tmp_path / "model")
    chat = (str(write_lines(tmp_path / "chats.jsonl", chats(30))),)
    small = tmp_path / "small"
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(small)
    make_model(len(tokenizer) - 5).save_pretrained(small)
    without = tmp_path / "none"
    make_model(len(tokenizer)).save_pretrained(without)
    plain = tmp_path / "plain"
    publish(plain, template=None)
    torn = tmp_path / "torn"
    publish(torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-8])
    configs = [
        tuned(tmp_path, folder, f"run-{number}", chat=chat)
        for number, folder in enumerate((small, without, plain, torn))
    ]
    first, second = ranks(assembled, 2, *configs)
    assert first == second
    size = len(tokenizer)
    assert first[0] == (
        f"--from: found a tokenizer of {size} tokens ({small}) for a model of {size - 5}, expected "
        "the tokenizer that the model was trained with: its embedding is not made larger"
    )
    assert first[1].startswith(f"--from: found {without}, whose tokenizer cannot be loaded (")
    assert first[2].startswith(f"--from: found {plain} without a chat template")
    assert first[3].startswith(f"--from {torn}: ")
    assert "model.safetensors" in first[3]


def trained(rank: int, world_size: int, *configs: LmConfig) -> None:
    world = World(rank, world_size, rank, world_size)
    for config in configs:
        train_here(config.check(world), world)


def test_a_model_from_scratch_says_that_its_folder_has_weights(
    ranks: Ranks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = publish(tmp_path / "model")
    data = tmp_path / "words.txt"
    data.write_text("shard gather " * 200)
    config = tuned(tmp_path, model, "run", data=(str(data),), steps=1, seq_length=16)
    scratch = dataclasses.replace(config, pretrained=None)
    ranks(trained, 2, scratch)
    assert warning_in(capfd) == (
        f"warning    {model} has weights, and --model trains from scratch: --from uses them"
    )
    assert len(losses(scratch)) == 1
