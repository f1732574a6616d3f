"""What a language model is evaluated on, and how opened data are described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from shardwise.app.recipes.core.model import next_token_loss
from shardwise.app.recipes.text.batches import (
    VALIDATION_SEQUENCES,
    ValidationLoss,
    loss_on_tokens,
    open_data,
    validation_tokens,
)
from shardwise.app.recipes.text.config import LmConfig
from shardwise.app.recipes.text.data import SEPARATOR, VOCAB_SIZE, Bytes, Sequences, load_text
from shardwise.elastic.world import World
from shardwise.insight.schema.option import OptionError
from tests.recipes.small import small_config

CPU = torch.device("cpu")


def place_of(rank: int, size: int) -> Any:
    """Where a rank trains, as far as its data ask."""
    world = World(rank, size, 0, 1)
    display = SimpleNamespace(say=print)
    return SimpleNamespace(world=world, readers=world, device=CPU, display=display)


ALONE = place_of(0, 1)


class Bigrams(nn.Module):
    """Predicts a token from the one before; counts what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB_SIZE, VOCAB_SIZE)
        self.seen: list[tuple[int, ...]] = []
        self.modes: set[bool] = set()

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.seen.append(tuple(input_ids.shape))
        self.modes.add(self.training)
        return SimpleNamespace(logits=self.table(input_ids))


class Counted:
    """Tokens that count up, and which parts of them were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, length: int) -> NDArray[np.int64]:
        assert 0 <= start <= start + length <= self.size
        self.parts.append((start, length))
        return np.arange(start, start + length) % SEPARATOR


def loss_on(
    model: nn.Module, stream: Counted, config: LmConfig, place: Any = ALONE
) -> ValidationLoss:
    return loss_on_tokens(model, stream.read, len(stream), config, place)


# -- validation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 64, 100])
def test_validation_loss_does_not_depend_on_the_size_of_a_batch(
    tmp_path: Path, group: None, batch_size: int
) -> None:
    model = Bigrams()
    stream = Counted(1000)
    config = small_config(tmp_path, batch_size=batch_size)
    found = loss_on(model, stream, config)()
    assert max(rows for rows, _ in model.seen) <= batch_size
    assert sum(rows for rows, _ in model.seen) == VALIDATION_SEQUENCES
    rows = [torch.from_numpy(stream.read(start, length)) for start, length in [*stream.parts]]
    with torch.no_grad():
        expected = next_token_loss(model, torch.stack(rows)).item()
    assert found == {"validation_loss": pytest.approx(expected, rel=1e-5)}


def test_evaluation_leaves_the_model_in_training_and_without_gradients(
    tmp_path: Path, group: None
) -> None:
    model = Bigrams()
    loss_on(model, Counted(100), small_config(tmp_path))()
    assert model.modes == {False}, "without dropout"
    assert model.training
    assert model.table.weight.grad is None


@pytest.mark.parametrize("size", [1, 2, 3, 64, 100])
def test_sequences_reach_from_the_first_token_to_the_last_in_every_world(
    tmp_path: Path, size: int
) -> None:
    config = small_config(tmp_path, seq_length=16)
    stream = Counted(5000)
    for rank in range(size):
        loss_on(Bigrams(), stream, config, place_of(rank, size))
        share = len(stream.parts) / (rank + 1)
        assert share == max(1, VALIDATION_SEQUENCES // size), "every forward takes all ranks"
    starts = sorted(start for start, _ in stream.parts)
    assert len(starts) > VALIDATION_SEQUENCES - size
    assert {length for _, length in stream.parts} == {17}
    if len(starts) > 1:
        assert (starts[0], starts[-1]) == (0, 5000 - 17)
        gaps = np.diff(starts)
        assert gaps.max() - gaps.min() <= 1, "evenly spread"


def test_a_text_of_one_sequence_can_be_evaluated_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, seq_length=16)
    stream = Counted(17)
    loss_on(Bigrams(), stream, config)
    assert set(stream.parts) == {(0, 17)}


class Texts:
    """Documents for validation; which of them were asked for."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked = 0

    def validation_texts(self) -> Iterator[str]:
        for text in self.texts:
            self.asked += 1
            yield text


def held(source: Texts, length: int, count: int) -> NDArray[np.int64]:
    return validation_tokens(source, Bytes(), length, count)  # type: ignore[arg-type]


def test_documents_for_validation_stand_behind_separators_and_empty_ones_are_skipped() -> None:
    tokens = held(Texts("ab", "", "c"), length=4, count=1)
    assert tokens.tolist() == [SEPARATOR, 97, 98, SEPARATOR, 99]


def test_no_more_documents_are_read_than_are_needed() -> None:
    """The source may be a dataset of the hub that is larger than any disk."""
    source = Texts(*["abc"] * 100)
    assert len(held(source, length=4, count=2)) == 10
    assert source.asked == 3


def test_too_little_for_validation_is_refused() -> None:
    assert len(held(Texts("abcd"), length=4, count=64)) == 5, "one sequence is enough"
    message = "--data: found 4 tokens for validation .*, expected at least 5 with --seq-length 4"
    with pytest.raises(OptionError, match=message):
        held(Texts("abc", ""), length=4, count=64)


# -- bytes of files --------------------------------------------------------------------------------


def test_batches_are_the_sequences_of_the_order(tmp_path: Path) -> None:
    config = small_config(tmp_path, seq_length=16, seed=3)
    text = load_text(config.data, config.seq_length)
    sequences = Sequences(text.train, config.seq_length, config.train.seed)
    batch = sequences.batch(5, 4)
    assert (batch.shape, batch.dtype) == ((4, 17), torch.int64)
    expected = [text.train.read(sequences.start(position), 17) for position in range(5, 9)]
    assert batch.tolist() == np.stack(expected).tolist()


def test_opened_files_need_no_position_and_say_how_much_there_is(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    text = load_text(config.data, config.seq_length)
    data = open_data(text, Bytes(), config, ALONE)
    assert data.position is None, "the number of examples is enough to go on"
    assert data.summary == (
        f"{config.data[0]}: {len(text.train):,} tokens to train on, "
        f"{len(text.validation):,} for validation; 1 file"
    )
    data.close()
