"""What a language model learns from on one rank, opened: from files of bytes, or from streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.launch.world import World
from shardwise.recipes.checkpointing import Resumable
from shardwise.recipes.data import TextData
from shardwise.recipes.documents import Source, validation_tokens
from shardwise.recipes.lm_config import LmConfig
from shardwise.recipes.progress import brief
from shardwise.recipes.sources import Documents
from shardwise.recipes.streams import StreamBatches
from shardwise.recipes.task import Data
from shardwise.recipes.text import VALIDATION_SEQUENCES, TextBatches, Tokens
from shardwise.recipes.tokens import Bytes, Vocabulary, load_vocabulary


@dataclass(frozen=True)
class LmData:
    """Opened data.

    Attributes:
        batches: to learn from.
        validation: tokens to be judged by.
        vocabulary: what tokens mean.
        position: what has to be saved to go on; None where the number of examples says it all.
        summary: for people: how much there is.
    """

    batches: Data
    validation: Tokens
    vocabulary: Vocabulary
    position: Resumable | None
    summary: str


def open_data(
    text: TextData | Documents, config: LmConfig, world: World, device: torch.device
) -> LmData:
    """Open what :func:`check_lm` found.

    Raises:
        UserError: it cannot be opened, or there is too little.
    """
    if isinstance(text, TextData):
        files = f"{text.files:,} {'file' if text.files == 1 else 'files'}"
        summary = (
            f"{text.name}: {brief(len(text.train))} tokens to learn from, "
            f"{brief(len(text.validation))} held back; {files}"
        )
        batches = TextBatches(text, config, device)
        return LmData(batches, text.validation, Bytes(), None, summary)
    source = Source(text)
    vocabulary = load_vocabulary(text.tokenizer)
    length = config.seq_length
    held = validation_tokens(source, vocabulary, length, VALIDATION_SEQUENCES)
    streams = StreamBatches(source, vocabulary, length, config.streams, world, device)
    dealt = "by file" if source.dealt_by_file(streams.streams) else "by document"
    summary = (
        f"{text.summary} in {streams.streams} streams, dealt out {dealt}; {brief(len(held))} "
        f"tokens held back; tokenizer {vocabulary.name}, {vocabulary.used:,} tokens"
    )
    return LmData(streams, held, vocabulary, streams, summary)
