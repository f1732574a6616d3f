"""What each rank says of its steps: means every few seconds, bounded, read leniently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.runs.metrics import MOST_RANKS, RanksFile, RanksReader, RankStep


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ranks.jsonl"


def test_a_line_is_the_mean_of_its_steps_and_the_slow_rank_is_the_busy_one(path: Path) -> None:
    clock = Clock()
    file = RanksFile(path, clock)
    for step in range(1, 5):
        clock.now = 2.5 * step
        file.step(step, [RankStep(1.0, 0.75, 0.0, 100.0), RankStep(1.0, 0.0, 0.5 * step, 90.0)])
    file.close()
    (line,) = RanksReader(path).read()
    assert (line["step"], line["seconds"], line["world_size"]) == (4, 1.0, 2)
    assert line["busy"] == [0.25, 1.0]
    assert line["data"] == [0.0, 1.25]
    assert line["memory_mib"] == [100.0, 90.0]


def test_a_long_run_writes_few_lines(path: Path) -> None:
    clock = Clock()
    file = RanksFile(path, clock)
    for step in range(20_000):
        clock.now += 5.0
        file.step(step, [RankStep(1.0, 0.0, 0.0, 1.0)])
    file.close()
    assert 300 < len(path.read_text().splitlines()) < 600


def test_the_last_steps_get_a_line_at_the_end(path: Path) -> None:
    ranks = [RankStep(1.0, 0.5, 0.0, 1.0)]
    file = RanksFile(path, Clock())
    file.step(1, ranks)
    assert path.read_text() == ""
    file.close(1, ranks)
    assert RanksReader(path).read()[0]["busy"] == [0.5]


def test_of_many_ranks_the_busiest_are_listed(path: Path) -> None:
    ranks = [RankStep(1.0, 1 - rank / 2000, 0.0, 1.0) for rank in range(1000)]
    file = RanksFile(path, Clock())
    file.step(1, ranks)
    file.close(1, ranks)
    (line,) = RanksReader(path).read()
    assert line["ranks"] == list(range(1000 - MOST_RANKS, 1000))
    assert line["world_size"] == 1000


def test_steps_that_a_resumed_run_repeats_replace_those_before(path: Path) -> None:
    for world in (2, 1):
        for step in (3, 5):
            ranks = [RankStep(1.0, 0.0, 0.0, 1.0)] * world
            file = RanksFile(path, Clock())
            file.step(step, ranks)
            file.close(step, ranks)
    assert [(each["step"], each["world_size"]) for each in RanksReader(path).read()] == [
        (3, 1),
        (5, 1),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"busy": ["a"]},
        {"busy": [1.0, 2.0]},
        {"busy": [1e999]},
        {"ranks": [-1]},
        {"ranks": {"a": 1}},
        {"step": -1},
        {"seconds": "1"},
    ],
)
def test_a_damaged_line_is_left_out(path: Path, change: dict[str, object]) -> None:
    right = {
        "step": 1,
        "seconds": 1.0,
        "world_size": 1,
        "ranks": [0],
        "busy": [1.0],
        "data": [0.0],
        "memory_mib": [1.0],
    }
    lines = [right, {**right, **change}, {**right, "step": 9}]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + "noise\n")
    assert [each["step"] for each in RanksReader(path).read()] == [1, 9]
