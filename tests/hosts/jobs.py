"""Training over two hosts as a user starts it, and faults of host 1 meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from benchmarks._hosts import Host
from tests.hosts.network import left_on, start

WAIT = 200.0  # seconds that anything may take on a busy machine


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        codes: exit codes, a host each.
        said: standard output of host 0.
        told: standard error, a host each.
        left: what outlived the commands on either host.
        named: seconds from the fault until host 0 named what was lost; 0: there was none.
        closed: seconds from the fault until host 1's command ended.
    """

    codes: list[int]
    said: str
    told: list[str]
    left: list[str]
    named: float
    closed: float


class Job:
    """A command on each of two hosts.

    Args:
        hosts: where.
        folder: where it runs.
        name: of what it writes there: a run, and what its commands say.
        module: what runs, with ``python -m``.
        arguments: of the module; ``RANK`` stands for the number of the host.
    """

    def __init__(
        self, hosts: tuple[Host, Host], folder: Path, name: str, module: str, arguments: str
    ) -> None:
        self.hosts, self._folder, self._name = hosts, folder, name
        self.commands = []
        for rank, host in enumerate(hosts):
            words = arguments.replace("RANK", str(rank)).split()
            with self._file(rank, "out").open("w") as out, self._file(rank, "err").open("w") as err:
                started = start(host, module, *words, folder=folder, out=out, err=err)
            self.commands.append(started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for command in self.commands:
            command.kill()
            command.wait()

    def disturb(self, step: int, fault: Fault) -> Ended:
        """Cause a fault on host 1 after a step, and wait for the end.

        What can be undone is undone as soon as host 0 has named it.
        """
        metrics = self._folder / self._name / "metrics.jsonl"
        self._wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step,
            f"step {step}",
        )
        began = time.monotonic()
        undo = fault(self)
        self._wait_until(lambda: "continuing" in self._told(0), "continuing")
        named = time.monotonic() - began
        undo()
        return self.end(began, named)

    def end(self, began: float = 0.0, named: float = 0.0) -> Ended:
        """Wait for both commands to end.

        Args:
            began: when a fault came, on the monotonic clock.
            named: seconds until host 0 named it.
        """
        second = self.commands[1].wait(timeout=WAIT)
        closed = time.monotonic() - began
        first = self.commands[0].wait(timeout=WAIT)
        left = left_on(*self.hosts)
        told = [self._told(rank) for rank in range(2)]
        return Ended([first, second], self._file(0, "out").read_text(), told, left, named, closed)

    def _wait_until(self, happens: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, which must be before host 0 ends."""
        deadline = time.monotonic() + WAIT
        while not happens():
            told = f"host 0 told: {self._told(0)!r}"
            assert time.monotonic() < deadline, f"no {what!r} within {WAIT} s; {told}"
            assert self.commands[0].poll() is None or happens(), f"no {what!r} at all; {told}"
            time.sleep(0.02)

    def _told(self, rank: int) -> str:
        return self._file(rank, "err").read_text()

    def _file(self, rank: int, suffix: str) -> Path:
        return self._folder / f"{self._name}-{rank}.{suffix}"


#: Disturbs host 1; returns what undoes it as far as that can be.
Fault = Callable[[Job], Callable[[], None]]


def kill_rank(job: Job) -> Callable[[], None]:
    """Kill the first rank of host 1, but not its launcher."""
    psutil.Process(job.commands[1].pid).children()[0].kill()
    return lambda: None


def kill_host(job: Job) -> Callable[[], None]:
    """Kill all processes of host 1."""
    job.commands[1].kill()  # first, or it might report its ranks
    _signal_all(job.hosts[1].running(), signal.SIGKILL)
    return lambda: None


def pause_host(job: Job) -> Callable[[], None]:
    """Suspend all processes of host 1."""
    paused = job.hosts[1].running()
    _signal_all(paused, signal.SIGSTOP)
    return lambda: _signal_all(paused, signal.SIGCONT)


def cut_link(job: Job) -> Callable[[], None]:
    """Cut the link; both hosts continue."""
    job.hosts[1].ip("link", "set", "eth0", "down")
    return lambda: None


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
