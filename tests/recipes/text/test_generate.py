"""How tokens are drawn, and when a text ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.app.recipes.core.model import Sampling, generate_tokens

pytest.importorskip("transformers")

LOGITS = torch.tensor([0.1, 3.0, 2.0, -1.0])  # probabilities .04, .69, .25, .01


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(temperature=0), {1}),
        (Sampling(top_k=1), {1}),
        (Sampling(top_k=2), {1, 2}),
        (Sampling(top_p=0.5), {1}),
        (Sampling(top_p=0.9), {1, 2}),
        (Sampling(temperature=0.01), {1}),
        (Sampling(temperature=20), {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_only_likely_tokens_are_drawn(sampling: Sampling, drawn: set[int]) -> None:
    draw = sampling.drawing()
    assert {draw(LOGITS) for _ in range(200)} == drawn


def test_tokens_are_drawn_by_their_probability_and_the_seed() -> None:
    draws = [Sampling(seed=seed).drawing() for seed in (5, 5, 6)]
    first, again, other = [[draw(LOGITS) for _ in range(2000)] for draw in draws]
    assert first == again != other
    assert abs(first.count(1) / 2000 - 0.69) < 0.05


class _Counting(nn.Module):
    """A model whose next token is the last one plus one, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        self.seen.append(input_ids.shape[1])
        logits = nn.functional.one_hot(input_ids + 1, 12).float()
        logits[..., 11] = 2  # a row of the embedding that no token has
        return SimpleNamespace(logits=logits)


def _counted(prompt: list[int], count: int, window: int = 100, stop: int = 99) -> list[int]:
    tokens = generate_tokens(
        _Counting(),
        prompt,
        count,
        Sampling(temperature=0),
        vocab_size=11,
        window=window,
        device=torch.device("cpu"),
        stop=frozenset({stop}),
    )
    return list(tokens)


def test_a_text_ends_at_its_length_or_at_a_stop_token() -> None:
    assert _counted([1], 4) == [2, 3, 4, 5]
    assert _counted([1], 9, stop=4) == [2, 3], "the stop token is no part of the text"


def test_the_older_half_is_forgotten_when_the_window_is_full() -> None:
    model = _Counting()
    options: dict[str, Any] = {"vocab_size": 11, "window": 4, "device": torch.device("cpu")}
    tokens = generate_tokens(model, [0, 1, 2, 3, 4], 5, Sampling(temperature=0), **options)
    assert list(tokens) == [5, 6, 7, 8, 9]
    assert model.seen == [4, 2, 3, 4, 2]
