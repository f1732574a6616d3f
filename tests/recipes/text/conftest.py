"""A fixture of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.text.published import chats, publish, write_lines


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model with its tokenizer, and files of chats and of texts beside it."""
    folder = tmp_path_factory.mktemp("published")
    publish(folder / "model")
    write_lines(folder / "chats.jsonl", chats(60))
    write_jsonl(folder / "texts.jsonl", texts(300))
    return folder
