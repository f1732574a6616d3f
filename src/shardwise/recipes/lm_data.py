"""What a language model learns from on one rank, opened: from files of bytes, or from streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.launch.world import World
from shardwise.recipes.ahead import ReadAhead
from shardwise.recipes.checkpointing import Resumable
from shardwise.recipes.data import TextData
from shardwise.recipes.document_order import ShuffleBuffer
from shardwise.recipes.documents import Source, validation_tokens
from shardwise.recipes.lm_config import LmConfig
from shardwise.recipes.progress import brief
from shardwise.recipes.sources import Documents
from shardwise.recipes.streams import StreamBatches
from shardwise.recipes.task import Data, nothing
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
        close: ends what reads ahead.
    """

    batches: Data
    validation: Tokens
    vocabulary: Vocabulary
    position: Resumable | None
    summary: str
    close: Callable[[], None] = nothing


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
    shuffle = ShuffleBuffer(config.shuffle_buffer, config.train.seed)
    streams = StreamBatches(source, vocabulary, length, config.streams, world, shuffle)
    dealt = "by file" if source.dealt_by_file(streams.streams) else "by document"
    order = f", shuffled in buffers of {shuffle.size:,} documents" if shuffle.size else ""
    summary = (
        f"{text.summary} in {streams.streams} streams, dealt out {dealt}{order}; "
        f"{brief(len(held))} tokens held back; "
        f"tokenizer {vocabulary.name}, {vocabulary.used:,} tokens"
    )
    ahead = ReadAhead(streams, world.size, device)
    return LmData(ahead, held, vocabulary, ahead, summary, ahead.close)
