"""A training as a user starts it, whose processes are killed meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from _report import ROOT
from shardwise.elastic.starting import STACKS
from shardwise.runs.files import RunFiles
from shardwise.runs.metrics import Follower

#: Seconds since the measurement began, and the rank or the replica to which something happens.
Fault = tuple[float, int]
#: Seconds, and the tokens that parameters have learned from by then, none of them twice.
Progress = tuple[float, int]

_POLL = 0.02  # seconds
_STRETCHED = ROOT / "benchmarks" / "stretched"
_LONGEST = 300.0  # seconds without progress, after which a training counts as stuck


class GoodputError(RuntimeError):
    """A training ended, or made no progress; the message has what it has said."""


def schedule(per_minute: float, seconds: float, victims: int, seed: str) -> list[Fault]:
    """Draw as many faults as a rate means, at any time and victim with the same probability.

    These are the faults of a Poisson process, given how many there are.

    Args:
        per_minute: faults of all victims together.
        seconds: that they are spread over.
        victims: ranks, or replicas.
        seed: the same one draws the same faults.
    """
    draw = random.Random(seed)
    count = round(per_minute * seconds / 60)
    return sorted((draw.uniform(0, seconds), draw.randrange(victims)) for _ in range(count))


def useful(progress: Sequence[Progress], seconds: float) -> tuple[Progress, Progress] | None:
    """Return the first and the last progress of a measurement.

    It begins with the first progress, and ends with the first one that comes after so many seconds
    and is an advance. A training that repeats steps then, or starts again, is waited for.

    Args:
        progress: in the order in which it was seen. It falls back where steps were lost.
        seconds: that the measurement lasts at least.

    Returns:
        Both; None: it has not ended.
    """
    for before, now in itertools.pairwise(progress):
        if now[0] - progress[0][0] >= seconds and now[1] > before[1]:
            return progress[0], now
    return None


def speed(case: Mapping[str, Any]) -> float:
    """Return the useful tokens per second of a run."""
    return float(case["tokens"] / case["seconds"])


class StepsWatched:
    """A synchronous training: the steps in ``metrics.jsonl``.

    A restart cuts off those that it repeats.

    Args:
        out: the folder of the run.
        tokens_per_step: of all ranks.
    """

    def __init__(self, out: Path, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._file = Follower(RunFiles(out).metrics, self._begin, self._line)

    def tokens(self) -> int | None:
        """Return the tokens of the steps so far."""
        self._file.read()
        return self._step * self._tokens_per_step if self._step else None

    def process_of(self, victim: int, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        """Return the process of a rank."""
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                if _is_alive(process) and victim in map(_rank_with, process.open_files()):
                    return process
        return None

    def _begin(self) -> None:
        self._step = 0

    def _line(self, line: bytes, _: int) -> None:
        self._step = json.loads(line)["step"]


class RoundsWatched:
    """Replicas that are worlds of their own: the lines of ``quorum.jsonl``.

    Where all replicas are lost at once, they repeat the rounds since their last checkpoint.

    Args:
        out: the folder of the run.

    Attributes:
        by_round: the tokens of each round.
    """

    def __init__(self, out: Path) -> None:
        self._file = Follower(RunFiles(out).quorum, self._begin, self._line)

    def tokens(self) -> int | None:
        """Return the tokens of all rounds so far."""
        self._file.read()
        return sum(self.by_round.values()) if self.by_round else None

    def process_of(self, victim: int, processes: Sequence[psutil.Process]) -> psutil.Process | None:
        """Return the first process of a replica."""
        self._file.read()
        for process in processes:
            if process.pid == self._pids.get(victim) and _is_alive(process):
                return process
        return None

    def _begin(self) -> None:
        self._pids: dict[int, int] = {}
        self.by_round: dict[int, int] = {}

    def _line(self, line: bytes, _: int) -> None:
        event = json.loads(line)
        if event["event"] == "started":
            self._pids[event["replica"]] = event["pids"][0]
        elif event["event"] == "round":
            number = event["round"]
            self.by_round = {r: count for r, count in self.by_round.items() if r < number}
            self.by_round[number] = sum(event["tokens"])


def _rank_with(file: Any) -> int | None:
    """Return which rank of a host has a file open that the launcher has asked for; None: none."""
    # Not by RANK: ranks are forked, and the system shows the environment that the first process
    # had.
    path = Path(file.path)
    return int(path.parent.name.rpartition("-")[2]) if path.name == STACKS else None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Training:
    """A command that trains on this machine, with stretched steps.

    Args:
        arguments: what follows ``shardwise``.
        folder: for what it says.
        step: seconds that forward and backward of a step last.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, step: float) -> None:
        folder.mkdir(parents=True)
        self._said = folder / "said"
        paths = [str(_STRETCHED), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self._said.open("w") as said:
            self._process = psutil.Popen(
                [sys.executable, "-P", "-m", "shardwise", *arguments],
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **env, "GOODPUT_STEP": str(step)},
            )

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        """Kill whatever is left."""
        for process in [*self.processes(), self._process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def said(self) -> str:
        """Return the end of what the command has said."""
        return self._said.read_text(errors="replace")[-2000:]

    def check_runs(self) -> None:
        """Raise unless the command runs.

        Raises:
            GoodputError: it has ended.
        """
        if (code := self._process.poll()) is not None:
            raise GoodputError(f"the training ended with exit code {code}: {self.said()}")

    def stop(self, seconds: float = 120.0) -> None:
        """Ask the training to save and to end.

        Raises:
            GoodputError: it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired) as error:
            raise GoodputError(str(error)) from error

    def processes(self) -> list[psutil.Process]:
        """Return the processes that it has started, those that they have started included."""
        try:
            return list(self._process.children(recursive=True))
        except psutil.NoSuchProcess:
            return []


def disturb(
    training: Training,
    watched: StepsWatched | RoundsWatched,
    faults: Sequence[Fault],
    seconds: float,
    warm: int,
) -> tuple[list[Progress], list[Fault]]:
    """Kill processes of a training, and watch it.

    A fault whose victim is between two processes kills the next one, as soon as there is one.

    Args:
        training: that was started.
        watched: how far it is.
        faults: in order.
        seconds: to watch it.
        warm: tokens before the measurement begins.

    Returns:
        Its progress at the beginning and whenever that changed, and the faults that hit a process.

    Raises:
        GoodputError: it ended, or is stuck.
    """
    progress: list[Progress] = []
    hit: list[Fault] = []
    begin = changed = time.monotonic()
    while useful(progress, seconds) is None:
        time.sleep(_POLL)
        training.check_runs()
        now = time.monotonic()
        if now - changed > _LONGEST:
            said = f"the training made no progress for {_LONGEST:.0f} s: {training.said()}"
            raise GoodputError(said)
        tokens = watched.tokens()
        if tokens is None or (not progress and tokens < warm):
            continue
        if not progress:
            begin = now
        if not progress or tokens != progress[-1][1]:
            progress.append((now - begin, tokens))
            changed = now
        while len(hit) < len(faults) and faults[len(hit)][0] <= now - begin:
            victim = faults[len(hit)][1]
            process = watched.process_of(victim, training.processes())
            if process is None:
                break
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                hit.append((now - begin, victim))
    return progress, hit
