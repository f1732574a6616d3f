"""What is told of replicas that are worlds of their own, and what is written down."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.recipes.core.replicas import RoundsFile
from shardwise.diloco.coordinator import Attempt, Event, EventKind
from shardwise.elastic.world import ReplicaWorld


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    with contextlib.closing(Trial(tmp_path)) as made:
        yield made


class Trial:
    """A file, and what was told."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "quorum.jsonl"
        self.told: list[str] = []
        self.file = RoundsFile(self._path, 4, self.told.append)

    def close(self) -> None:
        self.file.close()

    @property
    def lines(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        assert all(line.pop("time") > 0 for line in lines)
        return lines


def test_a_round_has_a_line_with_its_members_and_their_tokens(trial: Trial) -> None:
    attempt = Attempt(9, 7, 9, {3: "x", 0: "y"}, {3: 100, 0: 200})
    trial.file.happened(
        Event(
            EventKind.ROUND, 8, seconds=0.25, live=(0, 1, 3), attempt=attempt, attempts=2, late=(1,)
        )
    )
    assert trial.lines == [
        {
            "event": "round",
            "round": 8,
            "replicas": [0, 3],
            "tokens": [200, 100],
            "late": [1],
            "attempts": 2,
            "seconds": 0.25,
        }
    ]
    assert trial.told == ["replicas   round 8: 2 of 4; replica 1 was late"]


def test_a_full_round_is_not_told(trial: Trial) -> None:
    attempt = Attempt(1, 0, 1, {0: "x"}, {0: 1})
    trial.file.happened(Event(EventKind.ROUND, 1, live=(0,), attempt=attempt, attempts=1))
    assert not trial.told


def test_losses_and_returns_are_told(trial: Trial) -> None:
    replica = ReplicaWorld(2, 4, "127.0.0.1:1", "", 1)
    trial.file.started(replica, [11, 12])
    trial.file.happened(Event(EventKind.JOINED, 7, 2, source=0, seconds=0.4, live=(0, 1, 2, 3)))
    trial.file.happened(Event(EventKind.LOST, 7, 2, live=(0, 1, 3)))
    trial.file.lost(replica, "was killed by SIGKILL")
    assert trial.told == [
        "replicas   replica 2 is back in round 8: caught up from replica 0 in 0.4 s",
        "replicas   replica 2 was lost in round 8; 3 of 4 go on",
        "replicas   replica 2 was killed by SIGKILL",
    ]
    assert [line["event"] for line in trial.lines] == ["started", "joined", "disconnected", "lost"]
    assert trial.lines[0]["pids"] == [11, 12]
    assert trial.lines[1]["incarnation"] == 1


def test_a_file_that_cannot_be_written_stops_nobody(trial: Trial) -> None:
    trial.file.close()
    trial.file.happened(Event(EventKind.LEFT, 1, 0))
