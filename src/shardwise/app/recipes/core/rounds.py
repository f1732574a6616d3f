"""What happens among replicas that are worlds of their own: for people, and in a file.

{"event": "started", "time": 1763931000.0, "replica": 2, "incarnation": 1, "pids": [4711]}
{"event": "round", "time": 1763931020.5, "round": 8, "replicas": [0, 1], "tokens": [25600, 12800],
 "late": [], "attempts": 1, "seconds": 0.04}
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.diloco.coordinator import Event, EventKind, numbers_of
from shardwise.elastic.errors import say
from shardwise.elastic.world import ReplicaWorld


class RoundsFile:
    """Writes a line of JSON for everything that happens, and tells of what is unusual.

    Args:
        path: the file; lines are appended.
        replicas: how many there are.
        report: called for each line of text.
    """

    def __init__(self, path: Path, replicas: int, report: Callable[[str], object] = say) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._writing = threading.Lock()
        self._replicas = replicas
        self._report = report
        self._incarnations: dict[int, int] = {}

    def close(self) -> None:
        """Close the file."""
        with self._writing, contextlib.suppress(OSError):
            self._file.close()

    def started(self, replica: ReplicaWorld, pids: list[int]) -> None:
        """Note that the processes of a replica were started."""
        self._incarnations[replica.number] = replica.restarts
        self._write("started", replica=replica.number, incarnation=replica.restarts, pids=pids)

    def lost(self, replica: ReplicaWorld, why: str) -> None:
        """Note that the processes of a replica have ended before the training has."""
        self._write("lost", replica=replica.number, incarnation=replica.restarts, why=why)
        self._report(f"replicas   replica {replica.number} {why}")

    def happened(self, event: Event) -> None:
        """Note what the quorum has reported."""
        number, going_on = event.replica, len(event.live)
        match event.kind:
            case EventKind.ROUND:
                self._round(event)
            case EventKind.LOST:
                self._write("disconnected", replica=number, round=event.round)
                them = "none go on" if not going_on else f"{going_on} of {self._replicas} go on"
                self._report(
                    f"replicas   replica {number} was lost in round {event.round + 1}; {them}"
                )
            case EventKind.LEFT:
                self._write("left", replica=number, round=event.round)
            case EventKind.JOINED | EventKind.CAUGHT_UP:
                source = None if event.source < 0 else event.source
                self._write(
                    "joined" if event.kind is EventKind.JOINED else "caught-up",
                    replica=number,
                    incarnation=self._incarnations.get(number, 0),
                    round=event.round,
                    source=source,
                    seconds=round(event.seconds, 3),
                )
                if source is not None:
                    self._report(
                        f"replicas   replica {number} is back in round {event.round + 1}: caught "
                        f"up from replica {source} in {event.seconds:.1f} s"
                    )

    def _round(self, event: Event) -> None:
        attempt = event.attempt
        assert attempt is not None
        members = sorted(attempt.members)
        self._write(
            "round",
            round=event.round,
            replicas=members,
            tokens=[attempt.tokens[replica] for replica in members],
            late=list(event.late),
            attempts=event.attempts,
            seconds=round(event.seconds, 3),
        )
        if event.late:
            verb = "was" if len(event.late) == 1 else "were"
            noun = "replica" if len(event.late) == 1 else "replicas"
            self._report(
                f"replicas   round {event.round}: {len(members)} of {self._replicas}; "
                f"{noun} {numbers_of(event.late)} {verb} late"
            )

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values})
        with self._writing, contextlib.suppress(OSError, ValueError):  # a full disk is no end
            self._file.write(line + "\n")
            self._file.flush()
