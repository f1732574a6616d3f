"""The tokenizer that stands for bytes: its ids are bytes, whatever the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.app.recipes.text.data import END_OF_TEXT, SEPARATOR, Bytes, byte_tokenizer
from tests.checkpoint.tilings import QUICK

pytest.importorskip("transformers")

TEXTS = ["", "a  b\n\n\tc", "déjà vu 🙂 \x00\x7f", f"x{END_OF_TEXT}y", " " * 40, "\r\n\u2028"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_bytes(loaded: object, text: str) -> None:
    assert loaded(text)["input_ids"] == Bytes().encode(text)  # type: ignore[operator]
    assert loaded.decode(Bytes().encode(text)) == text  # type: ignore[attr-defined]


@QUICK
@given(text=st.text())
def test_ids_of_any_text_are_bytes(loaded: object, text: str) -> None:
    assert loaded(text)["input_ids"] == Bytes().encode(text)  # type: ignore[operator]
    assert loaded.decode(Bytes().encode(text)) == text  # type: ignore[attr-defined]


def test_the_separator_is_the_end_of_text(loaded: object) -> None:
    assert loaded.eos_token_id == loaded.bos_token_id == SEPARATOR  # type: ignore[attr-defined]
    assert len(loaded) == SEPARATOR + 1  # type: ignore[arg-type]
