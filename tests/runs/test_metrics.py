"""Following a file of lines that grows, is cut, and is damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.runs.metrics import MAX_LINE, MOST_BYTES, Follower


class Reader:
    """Keeps the lines since the last beginning."""

    def __init__(self, path: Path, at_once: int = MOST_BYTES) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.begun = 0
        self.follower = Follower(path, self._begin, self._line, at_once)

    def _begin(self) -> None:
        self.begun += 1
        self.lines = []

    def _line(self, line: bytes, number: int) -> None:
        self.lines.append((number, line))

    def read(self) -> list[bytes]:
        self.follower.read()
        return [line for _, line in self.lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_line_is_read_once_and_only_when_it_is_complete(path: Path) -> None:
    reader = Reader(path)
    assert reader.read() == [], "the file does not exist yet"
    path.write_bytes(b"one\ntw")
    assert reader.read() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert reader.read() == [b"one", b"two", b"three"]
    assert [number for number, _ in reader.lines] == [1, 2, 3]
    begun = reader.begun
    assert reader.read() == [b"one", b"two", b"three"]
    assert reader.begun == begun, "nothing was read again"


def test_a_file_that_was_cut_is_read_anew_even_if_it_has_grown_since(path: Path) -> None:
    reader = Reader(path)
    path.write_bytes(b"1\n2\n3\n4\n")
    reader.read()
    path.write_bytes(b"1\n2\nthree\nfour\nfive\n")  # resumed behind 2, and further than before
    assert reader.read() == [b"1", b"2", b"three", b"four", b"five"]
    path.unlink()
    assert reader.read() == []


def test_a_line_that_is_too_long_is_cut_and_the_next_one_is_read(path: Path) -> None:
    reader = Reader(path)
    path.write_bytes(b"a\n" + b"x" * (3 * MAX_LINE) + b"\nb\n")
    first, long, last = reader.read()
    assert (first, last) == (b"a", b"b")
    assert MAX_LINE < len(long) < 2 * MAX_LINE
    with path.open("ab") as file:
        file.write(b"c\n")
    assert reader.read()[3:] == [b"c"]


def test_a_file_that_no_training_wrote_is_refused_and_not_read(path: Path) -> None:
    path.touch()
    os.truncate(path, 60 << 30)  # a hole: it takes no blocks
    with pytest.raises(CheckpointError, match=r"found .64,424,509,440 bytes., expected"):
        Reader(path).read()
    path.write_bytes(b"1\n")
    os.truncate(path, 1 << 30)
    with pytest.raises(CheckpointError, match=r"line 2: found .more than .* at most 1,048,576"):
        Reader(path).read()


def test_a_long_file_is_read_in_parts_each_line_once(path: Path) -> None:
    lines = [b"%d" % number for number in range(100)]
    path.write_bytes(b"\n".join(lines) + b"\nincompl")
    reader = Reader(path, at_once=64)
    found = reader.read()
    assert 0 < len(found) < 100
    assert reader.follower.left
    while reader.follower.left:
        found = reader.read()
    assert found == lines
    assert reader.begun == 1
    with path.open("ab") as file:
        file.write(b"ete\n")
    assert reader.read() == [*lines, b"incomplete"]


def test_a_pipe_is_refused_and_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="expected a regular file"):
        Reader(path).read()
