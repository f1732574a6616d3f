"""A training as a user starts it, whose processes are killed meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from _goodput_counts import Fault, Progress, useful
from _report import ROOT

_POLL = 0.02  # seconds
_STRETCHED = ROOT / "benchmarks" / "stretched"
_LINE = 1 << 14  # bytes that hold the last line of a file
_LONGEST = 300.0  # seconds without progress, after which a training counts as stuck


class GoodputError(RuntimeError):
    """A training ended, or made no progress; the message has what it has said."""


class Watched(Protocol):
    """A training, as its files tell."""

    def tokens(self) -> int | None:
        """Return the tokens that it has learned from; None: it has not begun."""

    def process_of(self, victim: int, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        """Return the process of a rank or a replica; None: there is none at the moment."""


class StepsWatched:
    """A synchronous training: the steps in ``metrics.jsonl``.

    A restart cuts off those that it repeats.

    Args:
        out: the folder of the run.
        tokens_per_step: of all ranks.
    """

    def __init__(self, out: Path, tokens_per_step: int) -> None:
        self._file = out / "metrics.jsonl"
        self._tokens_per_step = tokens_per_step

    def tokens(self) -> int | None:
        """Return the tokens of the steps so far."""
        try:
            with self._file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE))
                lines = file.read().split(b"\n")[:-1]  # the last one is not whole yet
        except FileNotFoundError:
            return None
        return json.loads(lines[-1])["step"] * self._tokens_per_step if lines else None

    def process_of(self, victim: int, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        """Return the process of a rank."""
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                if _is_alive(process) and process.environ().get("RANK") == str(victim):
                    return process
        return None


class RoundsWatched:
    """Replicas that are worlds of their own: the lines of ``quorum.jsonl``.

    Where all replicas are lost at once, they repeat the rounds since their last checkpoint.

    Args:
        out: the folder of the run.

    Attributes:
        events: all lines.
        by_round: the tokens of each round.
    """

    def __init__(self, out: Path) -> None:
        self._file = out / "quorum.jsonl"
        self._read = 0
        self.events: list[dict[str, Any]] = []
        self.by_round: dict[int, int] = {}

    def tokens(self) -> int | None:
        """Return the tokens of all rounds so far."""
        self._look()
        return sum(self.by_round.values()) if self.by_round else None

    def process_of(self, victim: int, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        """Return the first process of a replica."""
        self._look()
        pids = [
            event["pids"][0]
            for event in self.events
            if event["event"] == "started" and event["replica"] == victim
        ]
        for process in processes:
            if pids and process.pid == pids[-1] and _is_alive(process):
                return process
        return None

    def named(self, phases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what processes have told, with their replicas as ranks."""
        self._look()
        replicas = {
            pid: event["replica"]
            for event in self.events
            if event["event"] == "started"
            for pid in event["pids"]
        }
        return [
            {**line, "rank": replicas[line["pid"]]} for line in phases if line["pid"] in replicas
        ]

    def _look(self) -> None:
        """Read what was written since the last time."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == "round":
                number = event["round"]
                self.by_round = {r: count for r, count in self.by_round.items() if r < number}
                self.by_round[number] = sum(event["tokens"])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Happened:
    """What was seen of a training.

    Attributes:
        progress: at the beginning, and whenever it changed.
        faults: those that hit a process, and when they did, on the monotonic clock.
        begin: when the measurement began, on the monotonic clock.
    """

    progress: list[Progress] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    begin: float = 0.0


class Training:
    """A command that trains on this machine, with stretched steps.

    Args:
        arguments: what follows ``shardwise``.
        folder: for what it says, and its phases.
        step: seconds that forward and backward of a step last.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, step: float) -> None:
        folder.mkdir(parents=True)
        self._said, self._phases = folder / "said", folder / "phases.jsonl"
        paths = [str(_STRETCHED), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shardwise", *arguments],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "GOODPUT_STEP": str(step),
                    "GOODPUT_PHASES": str(self._phases),
                },
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill whatever is left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.processes(), psutil.Process(self._process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()

    def said(self) -> str:
        """Return what the command has said."""
        return self._said.read_text(errors="replace")

    def phases(self) -> list[dict[str, Any]]:
        """Return what its processes have told of how far they are."""
        return [json.loads(line) for line in self._phases.read_text().splitlines()]

    def check_runs(self) -> None:
        """Raise unless the command runs.

        Raises:
            GoodputError: it has ended.
        """
        if (code := self._process.poll()) is not None:
            raise GoodputError(f"the training ended with exit code {code}: {self.said()[-2000:]}")

    def stop(self, seconds: float = 120.0) -> int:
        """Ask the training to save and to end; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(seconds)

    def processes(self) -> list[psutil.Process]:
        """Return the processes that it has started, those that they have started included."""
        try:
            return list(psutil.Process(self._process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []


def disturb(
    training: Training,
    watched: Watched,
    faults: Sequence[Fault],
    seconds: float,
    warm: int,
) -> Happened:
    """Kill processes of a training, and watch it.

    A fault whose victim is between two processes kills the next one, as soon as there is one.

    Args:
        training: that was started.
        watched: how far it is.
        faults: in order.
        seconds: to watch it.
        warm: tokens before the measurement begins.

    Raises:
        GoodputError: it ended, or is stuck.
    """
    happened = Happened()
    left = list(faults)
    changed = time.monotonic()
    for now in _times():
        training.check_runs()
        if now - changed > _LONGEST:
            said = training.said()[-2000:]
            raise GoodputError(f"the training made no progress for {_LONGEST:.0f} s: {said}")
        tokens = watched.tokens()
        if tokens is None or (not happened.progress and tokens < warm):
            continue
        if not happened.progress:
            happened.begin = now
        at = now - happened.begin
        if not happened.progress or tokens != happened.progress[-1].tokens:
            happened.progress.append(Progress(at, tokens))
            changed = now
            if useful(happened.progress, seconds) is not None:
                return happened
        while left and left[0].at <= at:
            process = watched.process_of(left[0].victim, training.processes())
            if process is None:
                break
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                happened.faults.append(Fault(at, left.pop(0).victim))
    raise AssertionError


def _times() -> Iterator[float]:
    """The monotonic clock, every :data:`_POLL` seconds."""
    while True:
        yield time.monotonic()
        time.sleep(_POLL)
