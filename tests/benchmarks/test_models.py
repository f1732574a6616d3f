"""The benchmarked models are as large as they are said to be, and alike on every rank."""

from __future__ import annotations

import torch


def test_parameters_are_counted_without_building() -> None:
    from _models import build, numel

    assert numel("tiny") == sum(p.numel() for p in build("tiny", 0).parameters())
    assert 33e6 < numel("34m") < 35e6
    assert 145e6 < numel("150m") < 155e6


def test_groups_hold_every_parameter_once() -> None:
    from _models import build, groups

    model = build("tiny", 0)
    grouped = [p for group in groups(model) for module in group for p in module.parameters()]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_weights_are_the_same_on_every_rank_and_tokens_are_not() -> None:
    from _models import batches, build

    first, second = (build("tiny", 5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    drawn = [batch for rank in range(3) for batch in batches("tiny", 16, rank, 5)]
    assert len({tuple(batch.flatten().tolist()) for batch in drawn}) == len(drawn)
