"""Text as tokens and back: bytes, or a tokenizer of ``transformers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shardwise.recipes.config import OptionError
from shardwise.recipes.data import SEPARATOR, VOCAB_SIZE, decode

_ROWS = 64  # the rows of an embedding are a multiple of this: kernels like that


class Vocabulary(Protocol):
    """What tokens mean.

    Attributes:
        name: for people.
        size: rows of the model's embedding.
        used: tokens from here up are never drawn in a sample.
        separator: the token in front of every document.
    """

    name: str
    size: int
    used: int
    separator: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without a separator."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""


class Bytes:
    """A token is a byte of UTF-8."""

    name = "bytes"
    size = VOCAB_SIZE
    used = SEPARATOR
    separator = SEPARATOR

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes."""
        return decode(tokens)


class Tokenizer:
    """A tokenizer of ``transformers``; its end-of-text token stands between documents.

    Args:
        name: of the hub, or the folder that it was saved in.

    Raises:
        OptionError: it cannot be loaded, or has no token that could separate documents.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # each loader fails in its own way
            reason = " ".join(str(error).split())[:200]
            raise OptionError(
                "--tokenizer",
                f"{name}, which cannot be loaded ({reason})",
                "a tokenizer of the hub, with the network there, or the folder of a saved one",
            ) from None
        separator = self._tokenizer.eos_token_id
        if separator is None:
            separator = self._tokenizer.bos_token_id
        if separator is None:
            raise OptionError(
                "--tokenizer", f"{name} without eos_token and bos_token", "one that has either"
            )
        self.name = name
        self.used = len(self._tokenizer)
        self.size = -(-self.used // _ROWS) * _ROWS
        self.separator = int(separator)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        found = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(token) for token in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_vocabulary(tokenizer: str | None) -> Vocabulary:
    """The vocabulary that ``--tokenizer`` names; bytes where it is None."""
    return Bytes() if tokenizer is None else Tokenizer(tokenizer)
