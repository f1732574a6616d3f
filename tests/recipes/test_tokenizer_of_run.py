"""A run keeps its tokenizer, so that what is converted from it loads in transformers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.text.data import load_vocabulary
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import consolidate, convert
from shardwise.insight.schema.training import Existing, OutputConfig
from tests.recipes.corpora import texts, write_jsonl, write_tokenizer
from tests.recipes.running import train
from tests.recipes.small import small_config

pytest.importorskip("transformers")

TEXT = "shard gather, reduce\n"


def test_a_converted_run_loads_in_transformers_alone(
    ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named = str(write_tokenizer(tmp_path))
    plain = small_config(tmp_path, "bytes", steps=1)
    documents = write_jsonl(tmp_path / "documents.jsonl", texts(200))
    words = small_config(tmp_path, "words", steps=1)
    words = dataclasses.replace(words, tokenizer=named, data=(str(documents),))
    configs = {None: plain, named: words}
    assert ranks(train, 2, *configs.values()) == [["finished"] * 2] * 2
    for tokenizer, config in configs.items():
        out = config.files.root
        hf, folder = out.with_name(f"{out.name}-hf"), out.with_name(f"{out.name}-folder")
        convert(out, hf, Format.HF)
        convert(out, hf, Format.HF, force=True)  # over its own tokenizer
        consolidate(out, folder)
        ids = load_vocabulary(tokenizer).encode(TEXT)
        for each in (hf, folder):
            loaded = AutoTokenizer.from_pretrained(each)
            assert loaded(TEXT, add_special_tokens=False)["input_ids"] == ids
            model, told = AutoModelForCausalLM.from_pretrained(each, output_loading_info=True)
            assert not any(told.values()), told
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits
            assert logits.shape[-1] >= len(loaded)
        assert not list(hf.glob("metrics*")), "files of the run are not the model's"


def test_a_tokenizer_is_kept_complete_and_once(tmp_path: Path) -> None:
    files = RunDir(tmp_path)

    def save(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")

    def fail(folder: Path) -> None:
        save(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.keep_tokenizer(fail)
    assert not files.tokenizer.exists()
    files.keep_tokenizer(save)
    files.keep_tokenizer(fail)  # it is there
    assert [file.name for file in files.tokenizer.iterdir()] == ["tokenizer.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer"]
    files.run_json.write_text("{}")
    files.begin(OutputConfig(out=tmp_path, existing=Existing.OVERWRITE))
    assert not files.tokenizer.exists(), "the next run may have another one"
