"""The byte vocabulary as a tokenizer of ``transformers``: what a run without ``--tokenizer`` saves.

Byte-level BPE without merges has one token per byte. Its ids are the bytes, as in
:class:`.data.Bytes`, and the separator is its end-of-text token.
"""

from __future__ import annotations

from typing import Any

from shardwise.app.recipes.text.data import SEPARATOR, Tokenizer, Vocabulary

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> Any:
    """Return a fast tokenizer of ``transformers`` whose ids are bytes, and 256 for the end of text.

    Special tokens inside a text are read as bytes (``split_special_tokens``): a document that
    spells one out means those characters.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {_visible(byte): byte for byte in range(SEPARATOR)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def as_transformers(vocabulary: Vocabulary) -> Any:
    """Return a vocabulary as a tokenizer of ``transformers``, with the same ids."""
    return vocabulary.tokenizer if isinstance(vocabulary, Tokenizer) else byte_tokenizer()


def _visible(byte: int) -> str:
    """The character that byte-level BPE writes for a byte (GPT-2's table, Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves; the others follow 255, in order.
    """
    return chr(byte) if _is_printable(byte) else chr(256 + sum(map(_is_hidden, range(byte))))


def _is_printable(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255


def _is_hidden(byte: int) -> bool:
    return not _is_printable(byte)
