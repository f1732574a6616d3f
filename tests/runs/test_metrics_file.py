"""What ``metrics.jsonl`` keeps of a run that crashed, resumes or was damaged."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from shardwise.base.errors import UserError
from shardwise.runs.metrics import MAX_LINE
from shardwise.runs.metrics_file import MetricsFile, check_metrics, read_metrics


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(1, 6):
        file.write({"step": step})
    file.close()
    with path.open("a") as damaged:
        damaged.write('{"step": 6, "lo')  # killed while writing
    file = MetricsFile(path, 3)
    file.write({"step": 4, "again": True})
    file.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]


@pytest.mark.parametrize(
    "tail",
    [b'{"step": 4, "lo', b"\0" * 4096, b"\xff\xfe", '{"step": 4, "é'.encode()[:-1], b"4"],
    ids=["half", "zeros", "binary", "half a character", "a number"],
)
def test_a_last_line_that_a_crash_left_unfinished_is_dropped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n' + tail)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    check_metrics(path, 5)
    file = MetricsFile(path, 5)
    file.write({"step": 6})
    file.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 6]


def test_a_last_line_that_lacks_nothing_but_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    file = MetricsFile(path, 2)
    file.write({"step": 3})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_damage_behind_the_checkpoint_is_cut_off_with_what_came_after(tmp_path: Path) -> None:
    # What was written after the last checkpoint need not be on the disk when a host crashes.
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"\0" * 500 + b'\n{"step": 4}\n')
    check_metrics(path, 2)
    MetricsFile(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "is not valid JSON"),
        (b"\xff\xfe\0", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[2]", "found list of 1, expected an object"),
        (b"{}", "has no 'step'"),
        (b'{"step": "2"}', "'step': found '2', expected an integer"),
        (b'{"step": true}', "'step': found True, expected an integer"),
        (b'{"step": -2}', "'step': found -2, expected an integer"),
        (b'{"step": 2, "loss": NaN}', "the number NaN"),
        (b'{"step": 2, "loss": 1e999}', "'loss': found inf, expected a number"),
        (b'{"step": 2, "loss": 1' + b"0" * 400 + b"}", "'loss': found a huge number, expected a"),
        (b'{"step": 2, "loss": "low"}', "'loss': found 'low', expected a number"),
        (b"[" * 100_000, "is nested too deeply"),
        (b" " * (MAX_LINE + 1), "found 'more than 1,048,576 bytes', expected a line of numbers"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_changed(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    text = b'{"step": 1}\n' + line + b'\n{"step": 3}\n'
    path.write_bytes(text)
    for read in (read_metrics, lambda path: check_metrics(path, 3), lambda p: MetricsFile(p, 3)):
        with pytest.raises(UserError, match=r"^/.*metrics.jsonl, line 2") as caught:
            read(path)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 400
        assert caught.value.exit_code == 2
    assert path.read_bytes() == text


def test_metrics_are_a_file_and_no_link(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    check_metrics(path, 3)  # a run may have lost it
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"^/.*metrics.jsonl: cannot be opened"):
        check_metrics(path, 3)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"^/.*metrics.jsonl: found prw"):
        MetricsFile(path, 3)


def test_a_loss_that_is_no_number_is_written_as_none(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.write({"step": 1, "validation_loss": math.nan, "loss": math.inf})
    file.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records == [{"step": 1, "validation_loss": None, "loss": None}]
