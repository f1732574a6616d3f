"""Long work says what it does and how far it is; quick work says nothing."""

from __future__ import annotations

import threading

import pytest

from shardwise.base import progress as module
from shardwise.base.progress import LongWork, progress
from tests.waiting import wait_until

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("total", "unit", "done", "shown"),
    [
        (30_000, "chats", 12_000, "tokenizing, 12,000 of 30,000 chats, 40%, 30 s left"),
        (30_000, "chats", 0, "tokenizing, 0 of 30,000 chats, 0%"),
        (3 << 30, "bytes", 3 << 30, "tokenizing, 3.00 GiB of 3.00 GiB, 100%"),
        (None, "", 7, "tokenizing, 20 s"),
    ],
)
def test_it_says_how_much_and_how_long(
    monkeypatch: pytest.MonkeyPatch, total: int | None, unit: str, done: int, shown: str
) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    work = LongWork("tokenizing", total, unit)
    work.moved(done)
    now += 20.0
    assert str(work) == shown


def test_a_log_gets_a_line_now_and_then_even_while_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(module, "QUICK", 0.0)
    monkeypatch.setattr(module, "EVERY", 0.01)
    lines: list[str] = []

    def shown() -> bool:
        lines.extend(capsys.readouterr().err.splitlines())
        return len(lines) > 2

    with progress("planning for llama-8b"):
        wait_until(shown)
    assert all(line.startswith("planning for llama-8b, ") for line in lines)
    assert not [each for each in threading.enumerate() if each.name == "progress"]


def test_quick_work_and_work_that_fails_end_at_once(capsys: Capture) -> None:
    with progress("tokenizing", 2, "chats") as work:
        work.moved()
    with pytest.raises(ZeroDivisionError), progress("tokenizing", 2, "chats"):
        work.moved(1 // 0)
    assert capsys.readouterr() == ("", "")
