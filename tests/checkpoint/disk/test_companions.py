"""The files beside a model: which are copied, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk import companions
from shardwise.checkpoint.disk.companions import copy_companions, has_tokenizer, is_companion


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "chat_template.jinja",
        "vocab.txt",
        "spiece.model",
        "generation_config.json",
    ],
)
def test_files_of_tokenizers_are_companions(name: str) -> None:
    assert is_companion(name)


@pytest.mark.parametrize(
    "name", ["config.json", "run.json", "metrics.jsonl", "tokenizer.py", "model.safetensors", "txt"]
)
def test_other_files_are_none(name: str) -> None:
    assert not is_companion(name)


def test_the_first_of_each_name_is_copied(tmp_path: Path) -> None:
    step, run, out = (tmp_path / name for name in ("step", "run", "out"))
    for folder in (step, run / "tokenizer", out):
        folder.mkdir(parents=True)
    (step / "generation_config.json").write_text("of the step")
    (run / "generation_config.json").write_text("of the run")
    (run / "tokenizer" / "tokenizer.json").write_text("of the run")
    (run / "tokenizer.json").write_text("beside it")
    (run / "run.json").write_text("not of the model")
    assert not has_tokenizer(out)
    copy_companions([step, run, tmp_path / "nothing"], out)
    assert has_tokenizer(out)
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        "generation_config.json": "of the step",
        "tokenizer.json": "of the run",
    }


def test_links_are_followed_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    for name in ("snapshot", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to("../blob")
    copy_companions([tmp_path / "snapshot"], tmp_path / "out")
    copied = tmp_path / "out" / "tokenizer.json"
    assert copied.read_text() == "{}"
    assert not copied.is_symlink()


def test_what_is_no_file_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pipe", "large", "folder", "out"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / "tokenizer.json")
    (tmp_path / "large" / "tokenizer.json").write_text("12345")
    (tmp_path / "folder" / "tokenizer.json").mkdir()
    monkeypatch.setattr(companions, "_MAX_BYTES", 4)
    for name, found in (("pipe", "expected a regular file"), ("large", "5 bytes")):
        with pytest.raises(CheckpointError, match=found):
            copy_companions([tmp_path / name], tmp_path / "out")
    copy_companions([tmp_path / "folder"], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
