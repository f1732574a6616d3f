"""Logs of what ranks have called, compared through a store."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest
import torch

from shardwise.base.errors import RanksDivergedError
from shardwise.transport.base import NO_LABEL, Label
from shardwise.transport.collective_log import CollectiveLog, LoggedCall

pytestmark = pytest.mark.usefixtures("new_ranks")


class Store:
    """A store of ``torch.distributed``, as far as logs use it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.sets = 0

    def set(self, key: str, value: str) -> None:
        self.sets += 1
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


def _logs(store: Store, world_size: int = 2) -> list[CollectiveLog]:
    """Make the log of each rank."""
    return [
        CollectiveLog(
            Mock(
                rank=rank,
                others=[each for each in range(world_size) if each != rank],
                members=[10 + each for each in range(world_size)],
                store=store,
                once=Mock(return_value=itertools.count(1)),
            )
        )
        for rank in range(world_size)
    ]


def _tensors(*numels: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(numel, dtype=dtype) for numel in numels]


def test_ranks_that_call_the_same_are_silent() -> None:
    logs = _logs(Store())
    for name in ("a", "b"):
        for log in logs:
            log.add("all-gather", _tensors(3, 4), Label(name))
    for log in logs * 2:
        log.compare()


def test_the_first_call_that_differs_is_named_on_both_ranks() -> None:
    one, other = _logs(Store())
    for log in (one, other):
        log.add("all-gather", _tensors(3), Label("first"))
    one.add("all-gather", _tensors(5, 6), Label("left", "left.w: (5,)\nleft.b: (6,)"))
    other.add("reduce-scatter", _tensors(7), Label("right", "left.w: (5,)\nleft.b: (7,)"))
    one.compare()  # nothing of the other yet
    with pytest.raises(RanksDivergedError) as caught:
        other.compare()
    message = str(caught.value)
    assert "as collective number 1 over ranks [10, 11]" in message
    assert "rank 11 called the reduce-scatter of right (1 tensor, 7 elements of float32)" in message
    assert "rank 10 called the all-gather of left (2 tensors, 11 elements of float32)" in message
    assert "in which they differ: left.b: (7,), there left.b: (6,)" in message
    with pytest.raises(RanksDivergedError, match="rank 10 called the all-gather of left"):
        one.compare()


@pytest.mark.parametrize(
    "other",
    [
        LoggedCall("all-gather", _tensors(3), NO_LABEL),
        LoggedCall("all-reduce", _tensors(3, 4), NO_LABEL),
        LoggedCall("all-gather", _tensors(4, 3), NO_LABEL),
        LoggedCall("all-gather", _tensors(3, 4, dtype=torch.int32), NO_LABEL),
        LoggedCall("all-gather", _tensors(3, 4), Label("name")),
        LoggedCall("all-gather", _tensors(3, 4), Label(detail="weight")),
    ],
)
def test_anything_that_differs_gives_another_digest(other: LoggedCall) -> None:
    assert LoggedCall("all-gather", _tensors(3, 4), NO_LABEL).digest != other.digest


def test_a_rank_that_is_ahead_has_not_diverged() -> None:
    one, other = _logs(Store())
    for i in range(5):
        one.add("all-gather", _tensors(3), Label(str(i)))
    other.add("all-gather", _tensors(3), Label("0"))
    for log in (one, other, one):
        log.compare()


def test_calls_that_are_long_over_are_not_compared() -> None:
    one, other = _logs(Store())
    one.add("all-gather", _tensors(3), Label("mine"))
    other.add("all-gather", _tensors(3), Label("theirs"))
    for _ in range(16):
        for log in (one, other):
            log.add("all-gather", _tensors(3), Label("the same"))
    one.compare()
    other.compare()


def test_a_log_is_published_once_for_the_same_calls() -> None:
    store = Store()
    log, _ = _logs(store)
    log.add("all-gather", _tensors(3), NO_LABEL)
    log.compare()
    log.compare()
    assert store.sets == 1
    log.add("all-gather", _tensors(3), NO_LABEL)
    log.compare()
    assert store.sets == 2


def test_two_logs_of_a_group_do_not_mix() -> None:
    store = Store()
    numbers = itertools.count(1)
    peers = Mock(rank=0, others=[1], members=[0, 1], store=store, once=Mock(return_value=numbers))
    for log in (CollectiveLog(peers), CollectiveLog(peers)):
        log.add("all-gather", _tensors(3), NO_LABEL)
        log.compare()
    assert len(store.values) == 2


def test_a_store_that_is_gone_is_no_error() -> None:
    store = Mock(set=Mock(side_effect=RuntimeError("connection reset by peer")))
    log, _ = _logs(store)
    log.add("all-gather", _tensors(3), NO_LABEL)
    log.compare()
    store.set.assert_called_once()
