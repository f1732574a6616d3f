"""What is told of ranks that take long until their first step."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from pathlib import Path

import pytest

from shardwise.elastic import starting
from shardwise.elastic.starting import StartWatch, where


def _innermost(folder: Path) -> str:
    """Write the stack of this thread, and return it."""
    with (folder / "stacks").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=False)
    return (folder / "stacks").read_text()


def test_a_stack_is_shown_innermost_frame_first(tmp_path: Path) -> None:
    place = where(_innermost(tmp_path))
    inner, outer, *_ = place.split(" < ")
    assert inner.startswith("_innermost (test_starting.py:")
    assert outer.startswith("test_a_stack_is_shown_innermost_frame_first (test_starting.py:")
    assert place.endswith(" < ..."), "pytest's own frames are too many"


class _Rank:
    """A rank that answers a question with a stack of one frame."""

    is_starting = True

    def __init__(self, rank: int, place: str) -> None:
        self.rank, self._place, self._written = rank, place, ""

    def send(self, signum: int) -> None:
        assert signum == signal.SIGQUIT
        name = self._place
        if name:
            frame = f'  File "/a/b.py", line 7 in {name}'
            self._written += f"Current thread 0x1 (most recent call first):\n{frame}\n"

    def move(self, place: str) -> None:
        """Be somewhere else from now on."""
        self._place = place

    def stacks(self) -> str:
        return self._written


def test_ranks_are_asked_after_a_while_and_again_later() -> None:
    now, told = [0.0], list[str]()
    ranks = [_Rank(0, "recv"), _Rank(1, "load"), _Rank(2, "recv"), _Rank(3, "")]
    watch = StartWatch(ranks, told.append, lambda: now[0])

    def look(*times: float) -> list[str]:
        told.clear()
        for now[0] in times:
            watch.look()
        return list(told)

    assert look(0, 30, 59, 60) == [], "they have to answer first"
    assert look(61, 62) == [
        "starting   no step for 61 s: ranks 0, 2 in recv (b.py:7)",
        "starting   no step for 61 s: rank 1 in load (b.py:7)",
        "starting   no step for 61 s: rank 3 in a place that it does not tell",
    ]
    ranks[1].move("recv")
    for has_stepped in ranks[0], ranks[3]:
        has_stepped.is_starting = False
    assert look(239, 240, 241, 300) == ["starting   no step for 241 s: ranks 1, 2 in recv (b.py:7)"]


def test_nothing_is_told_of_ranks_that_have_stepped_meanwhile() -> None:
    now, told = [0.0], list[str]()
    ranks = [_Rank(0, "recv")]
    watch = StartWatch(ranks, told.append, lambda: now[0])
    now[0] = starting.PATIENCE
    watch.look()
    ranks[0].is_starting = False
    now[0] += 10
    watch.look()
    assert told == []


def test_ranks_are_not_asked_for_time_for_which_the_launcher_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = list[str]()
    watch = StartWatch([_Rank(0, "recv")], told.append)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
    watch.look()
    time.sleep(starting._WRITING)
    watch.look()
    assert told == []


def test_a_process_answers_a_signal_beside_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_open", [])
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        starting.answer_to(tmp_path / "report")
        signal.raise_signal(signal.SIGQUIT)
    finally:
        faulthandler.unregister(signal.SIGQUIT)
        for file in starting._open:
            file.close()
        over.set()
        other.join()
    stacks = (tmp_path / starting.STACKS).read_text()
    assert "test_a_process_answers_a_signal" in where(stacks)
    assert stacks.count("(most recent call first)") == 1, "stacks of running threads are not safe"
