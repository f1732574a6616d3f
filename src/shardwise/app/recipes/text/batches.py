"""What a language model trains on and is evaluated on, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardwise.app.recipes.core.batches import ReadAhead, Shuffled
from shardwise.app.recipes.core.build import evaluating
from shardwise.app.recipes.core.checkpointing import Resumable
from shardwise.app.recipes.core.model import next_token_loss
from shardwise.app.recipes.core.progress import brief
from shardwise.app.recipes.core.recipe import Data, TrainContext, nothing
from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.text.data import (
    VALIDATION_SHARE,
    Sequences,
    TextData,
    Tokenizer,
    Vocabulary,
)
from shardwise.base.units import counted
from shardwise.insight.schema.option import OptionError
from shardwise.insight.token_loss import TokenLoss
from shardwise.transport.peers import Peers

if TYPE_CHECKING:
    from shardwise.app.recipes.text.chat import ChatData, ChatLines
    from shardwise.app.recipes.text.documents import Documents, StreamSource
    from shardwise.app.recipes.text.streams import StreamBatches

VALIDATION_SEQUENCES = 64

#: The loss of a model on a batch.
Loss: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]


@dataclass
class ValidationLoss:
    """The loss on what is not trained on, divided among ranks.

    Attributes:
        model: the model to evaluate.
        loss: of the model on a batch: its sum, and what the sum of all batches is divided by.
        batches: returns those of this rank, in host memory. Equally many on every rank, since every
            forward takes all ranks.
        device: where this rank computes.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], tuple[float, float]]
    batches: Callable[[], Iterable[Any]]
    device: torch.device

    def __call__(self) -> dict[str, float]:
        """Return the mean over all ranks, in nats per token."""
        total = torch.zeros(2, dtype=torch.float64)
        with evaluating(self.model):
            for batch in self.batches():
                sums = self.loss(self.model, batch.to(self.device))
                total += torch.tensor(sums, dtype=torch.float64)
        everyone = Peers().gather_numbers(total, "the sum of validation losses")
        loss, count = everyone.sum(0).tolist()
        return {"validation_loss": loss / count}


def loss_on_tokens(
    model: nn.Module,
    read: Callable[[int, int], NDArray[np.int64]],
    size: int,
    config: LmConfig,
    place: TrainContext,
    loss: Loss = next_token_loss,
) -> ValidationLoss:
    """Return the loss on sequences spread evenly over tokens, which are read now.

    Args:
        model: the model to evaluate.
        read: returns tokens by the first one and their number, int64.
        size: how many there are.
        config: length and batch size.
        place: where this rank computes.
        loss: of the model on a batch: the mean over its tokens.
    """
    world = place.world
    total = max(1, VALIDATION_SEQUENCES // world.size) * world.size
    length = config.seq_length + 1
    starts = [(size - length) * i // max(1, total - 1) for i in range(total)]
    mine = np.stack([read(at, length) for at in starts[world.rank :: world.size]])
    batches = torch.split(torch.from_numpy(mine), config.train.batch_size)

    def sums(model: nn.Module, tokens: torch.Tensor) -> tuple[float, float]:
        return loss(model, tokens).item() * len(tokens), len(tokens)

    return ValidationLoss(model, sums, lambda: batches, place.device)


#: Evaluates a model: names and values, such as ``validation_loss``.
Evaluate: TypeAlias = Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class LmData:
    """Opened data.

    Attributes:
        batches: to train on.
        evaluation: for a model, what evaluates it.
        summary: for people, as text, once the run has begun: how much there is.
        notes: for people: what is not as they may expect; empty: nothing.
        loss: of a model on a batch: the mean over its tokens; or the sum, if targets are counted.
        targets: counts the targets of a batch; None: all batches have the same number.
        per_epoch: examples of an epoch; None: nothing is counted in epochs.
        position: what has to be saved to go on; None where the number of examples says it all.
        close: ends what reads ahead.
    """

    batches: Data
    evaluation: Callable[[nn.Module], Evaluate]
    summary: object
    notes: str = ""
    loss: Loss
    targets: Callable[[Any], int] | None = None
    per_epoch: int | None = None
    position: Resumable | None = None
    close: Callable[[], None] = nothing


def open_data(
    text: TextData | Documents | ChatData,
    vocabulary: Vocabulary,
    config: LmConfig,
    place: TrainContext,
) -> LmData:
    """Open what :meth:`LmConfig.check` found. Every rank calls it.

    Args:
        text: what was found.
        vocabulary: of the texts.
        config: the configuration.
        place: this rank among those that evaluate together, and among those between whom examples
            are divided. If these are more, what comes next is not known, and not read ahead.

    Raises:
        UserError: it cannot be opened, or there is too little.
    """
    # What is not trained on is not imported either.
    tokens = config.train.batch_size * config.seq_length
    of_tokens = TokenLoss(config.logits, place.display.say, tokens)
    loss = functools.partial(next_token_loss, loss=of_tokens)
    if isinstance(text, TextData):
        return _open_files(text, config, place, loss)
    if config.chat:
        assert isinstance(vocabulary, Tokenizer), "chats need a tokenizer"
        return _open_chats(cast("ChatData", text), vocabulary, config, place, of_tokens)
    return _open_documents(cast("Documents", text), vocabulary, config, place, loss)


def _open_files(text: TextData, config: LmConfig, place: TrainContext, loss: Loss) -> LmData:
    held = text.validation
    batches = Sequences(text.train, config.seq_length, config.train.seed)
    return LmData(
        batches=batches,
        per_epoch=None if config.train.epochs is None else batches.per_epoch,
        evaluation=lambda model: loss_on_tokens(model, held.read, len(held), config, place, loss),
        loss=loss,
        summary=f"{text.name}: {brief(len(text.train))} tokens to train on, "
        f"{brief(len(held))} for validation; {counted(text.files, 'file')}",
    )


def _open_documents(
    text: Documents, vocabulary: Vocabulary, config: LmConfig, place: TrainContext, loss: Loss
) -> LmData:
    from shardwise.app.recipes.text.documents import StreamSource
    from shardwise.app.recipes.text.streams import ShuffleBuffer, StreamBatches

    source = StreamSource(text)
    length = config.seq_length
    held = validation_tokens(source, vocabulary, length, VALIDATION_SEQUENCES)
    shuffle = ShuffleBuffer(config.shuffle_buffer, config.train.seed)
    streams = StreamBatches(source, vocabulary, length, config.streams, place.readers, shuffle)
    order = f", shuffled in buffers of {shuffle.size:,} documents" if shuffle.size else ""
    rest = (
        f"{order}; {brief(len(held))} tokens for validation; "
        f"tokenizer {vocabulary.name}, {vocabulary.used:,} tokens"
    )
    # Local files are read by the cores that train: there is no waiting to hide, and threads that
    # take turns at the interpreter's lock on busy cores make steps longer.
    busy = place.device.type == "cpu" and source.commit is None
    jumps = place.readers != place.world
    batches = streams if busy or jumps else ReadAhead(streams, place.world.size)
    return LmData(
        batches=batches,
        evaluation=lambda model: loss_on_tokens(
            model, lambda at, count: held[at : at + count], len(held), config, place, loss
        ),
        loss=loss,
        summary=_OfStreams(text.summary, streams, rest),
        position=batches,
        close=batches.close if isinstance(batches, ReadAhead) else nothing,
    )


@dataclass(frozen=True)
class _OfStreams:
    """A summary of documents in streams: how many, only a checkpoint may say."""

    documents: str
    streams: StreamBatches
    rest: str

    def __str__(self) -> str:
        return f"{self.documents} in {self.streams}{self.rest}"


def _open_chats(
    text: ChatData,
    vocabulary: Tokenizer,
    config: LmConfig,
    place: TrainContext,
    of_tokens: TokenLoss,
) -> LmData:
    from shardwise.app.recipes.text import conversations as chats
    from shardwise.app.recipes.text.chat import ChatEncoder

    encoder = ChatEncoder(vocabulary)
    length, world = config.seq_length, place.world

    def rows_of(lines: ChatLines) -> tuple[chats.ChatRows, str]:
        found = chats.survey(lines, encoder, length, world)
        return chats.ChatRows(lines, encoder, found, length, config.packing), found.notes(length)

    loss = functools.partial(chats.target_loss, loss=of_tokens)

    def held_loss(model: nn.Module, batch: chats.TargetBatch) -> tuple[float, float]:
        return loss(model, batch).item(), batch.target_count

    train, notes = rows_of(text.train)
    held, held_notes = rows_of(text.validation)
    given = {"": notes, "for validation: ": held_notes}
    batches: Shuffled | ReadAhead = Shuffled(len(train), config.train.seed, train.drawn)
    if place.device.type != "cpu" and place.readers == world:
        batches = ReadAhead(batches, world.size)
    return LmData(
        batches=batches,
        evaluation=lambda model: ValidationLoss(
            model, held_loss, lambda: held.batches(config.train.batch_size, world), place.device
        ),
        summary=f"{text.summary}; {train.summary}; tokenizer {vocabulary.name}, "
        f"{vocabulary.used:,} tokens",
        notes="; ".join(f"{part}{note}" for part, note in given.items() if note),
        loss=loss,
        targets=lambda batch: int(batch.target_count),
        per_epoch=len(train),
        close=batches.close if isinstance(batches, ReadAhead) else nothing,
    )


def validation_tokens(
    source: StreamSource, vocabulary: Vocabulary, length: int, count: int
) -> NDArray[np.int64]:
    """Tokens for ``count`` sequences that are not trained on, or for all that there are.

    Raises:
        OptionError: not even for one.
    """
    tokens: list[int] = []
    wanted = count * (length + 1)
    for text in source.validation_texts():
        if text:
            tokens += [vocabulary.separator, *vocabulary.encode(text)]
        if len(tokens) >= wanted:
            break
    if len(tokens) <= length:
        raise OptionError(
            "--data",
            f"{len(tokens)} tokens for validation (one document in {VALIDATION_SHARE})",
            f"at least {length + 1} with --seq-length {length}, or --eval-data with others",
        )
    return np.array(tokens[:wanted], dtype=np.int64)
