"""Batches that are read while the step before computes."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from shardwise.app.recipes.core import batches
from shardwise.app.recipes.core.batches import AHEAD, ReadAhead
from tests.waiting import wait_until

WAIT = 30.0  # seconds that anything may take on a busy machine


class Numbers:
    """Batches that hold their positions; what was read, and by whom."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.readers: set[str] = set()
        self.loaded: Any = None

    def batch(self, position: int, count: int) -> torch.Tensor:
        self.read.append(position)
        self.readers.add(threading.current_thread().name)
        return torch.arange(position, position + count)

    def state(self) -> dict[str, Any]:
        return {"read": len(self.read)}

    def load_state(self, state: Mapping[str, Any], where: Path) -> None:
        self.loaded = (state, where)

    def wait_for(self, count: int) -> None:
        wait_until(lambda: len(self.read) >= count)


def test_batches_come_in_order_and_a_position_is_of_what_was_taken() -> None:
    numbers = Numbers()
    data = ReadAhead(numbers, 3)
    assert data.state() == {"read": 0}
    for turn in range(5):
        numbers.wait_for(turn + AHEAD if turn else 0)
        # The last of 3 ranks, in batches of 2: positions 4 5, 10 11, ...
        assert data.batch(4 + 6 * turn, 2).tolist() == [4 + 6 * turn, 5 + 6 * turn]
        assert data.state() == {"read": turn + 1}
        assert len(numbers.read) <= turn + 1 + AHEAD, "the queue is bounded"
    data.close()
    assert numbers.readers == {"read-ahead"}
    assert "read-ahead" not in {thread.name for thread in threading.enumerate()}


def test_a_position_is_loaded_before_the_first_batch() -> None:
    numbers = Numbers()
    data = ReadAhead(numbers, 1)
    data.load_state({"read": 7}, Path("checkpoint"))
    assert numbers.loaded == ({"read": 7}, Path("checkpoint"))


def test_what_the_thread_meets_with_is_raised_at_the_step_that_needs_the_batch() -> None:
    class Failing(Numbers):
        def batch(self, position: int, count: int) -> torch.Tensor:
            if position == 4:
                raise OSError("the disk is gone")
            return super().batch(position, count)

    data = ReadAhead(Failing(), 1)
    for position in (0, 2):
        assert data.batch(position, 2).tolist() == [position, position + 1]
    for _ in range(2):  # and not a batch that never comes
        with pytest.raises(OSError, match="the disk is gone") as caught:
            data.batch(4, 2)
        assert 'raise OSError("the disk is gone")' in "".join(traceback.format_tb(caught.tb))
    assert data.state() == {"read": 2}
    data.close()


def test_other_examples_than_those_that_follow_are_refused() -> None:
    data = ReadAhead(Numbers(), 2)
    data.batch(0, 2)
    with pytest.raises(ValueError, match="found 2 examples from 2 asked for, expected 2 from 4"):
        data.batch(2, 2)
    data.close()


def test_a_source_that_stands_still_keeps_nobody_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "END", 0.05)
    goes_on = threading.Event()

    class Still(Numbers):
        def batch(self, position: int, count: int) -> torch.Tensor:
            if position == 1:
                assert goes_on.wait(WAIT)
            return super().batch(position, count)

    numbers = Still()
    data = ReadAhead(numbers, 1)
    data.batch(0, 1)
    data.close()  # returns, though the thread is in the middle of a batch
    goes_on.set()
    numbers.wait_for(2)  # and reads no third: the thread saw that it is over
    for thread in threading.enumerate():
        if thread.name == "read-ahead":
            thread.join(WAIT)
    assert numbers.read == [0, 1]


def test_signals_are_handled_while_a_batch_is_waited_for() -> None:
    handled = threading.Event()

    class Interrupted(Numbers):
        def batch(self, position: int, count: int) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGINT)
            assert handled.wait(WAIT), "the main thread waits, and handles no signal"
            return super().batch(position, count)

    def handle(signum: int, frame: FrameType | None) -> None:
        handled.set()

    before = signal.signal(signal.SIGINT, handle)
    data = ReadAhead(Interrupted(), 1)
    try:
        assert data.batch(0, 1).tolist() == [0]
    finally:
        data.close()
        signal.signal(signal.SIGINT, before)
