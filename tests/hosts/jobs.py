"""Training over hosts as a user starts it, and faults of one of them meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from benchmarks._hosts import Host
from tests.hosts.network import left_on, start
from tests.programs import Program, ranks_of

#: What trains in a folder, under a name; by name.
Jobs = Mapping[str, Callable[[Path, str], "Ended"]]
WAIT = 200.0  # seconds that anything may take on a busy machine
#: A program: the command itself, except for the time that it waits for more hosts.
IMPATIENT = """
from shardwise.app.cli.main import app
from shardwise.elastic import membership

membership.LAST_CALL = 0.2
app()
"""


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        codes: exit codes, a host each.
        said: standard output of host 0.
        told: standard error, a host each.
        left: what outlived the commands on either host.
        named: seconds from the fault until another host named what was lost; 0: there was none.
        closed: seconds from the fault until host 1's command ended.
    """

    codes: list[int]
    said: str
    told: list[str]
    left: list[str]
    named: float
    closed: float


class Job:
    """A command on each of several hosts, and perhaps on others later.

    Args:
        hosts: where.
        folder: where it runs.
        name: of what it writes there: a run, and what its commands say.
        module: what runs, with ``python -m``.
        arguments: of the module; ``RANK`` stands for the number of the host.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        name: str,
        module: str,
        arguments: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self._folder, self._name, self._module = hosts, folder, name, module
        self._arguments, self._env = arguments, env
        self.commands: list[Program] = []
        for rank, host in enumerate(hosts):
            self.start(host, str(rank))

    def start(self, host: Host, rank: str) -> None:
        """Start the command on one more host."""
        at = len(self.commands)
        words = self._arguments.replace("RANK", rank).split()
        with self.file(at, "out").open("w") as out, self.file(at, "err").open("w") as err:
            started = start(
                host, self._module, *words, env=self._env, folder=self._folder, out=out, err=err
            )
        self.commands.append(started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for command in self.commands:
            command.kill()
            command.wait()

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is completed."""
        self.wait_until(lambda: self.steps() >= step, f"step {step}")

    def steps(self) -> int:
        """Return the steps that are completed."""
        metrics = self._folder / self._name / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def disturb(self, step: int, fault: Fault, witness: int = 0) -> Ended:
        """Cause a fault after a step, and wait for the end.

        What can be undone is undone as soon as it is named.

        Args:
            step: after which it comes.
            fault: to cause.
            witness: the host that names it.
        """
        self.wait_for_step(step)
        began = time.monotonic()
        undo = fault(self)
        self.wait_until(lambda: "continuing" in self.told(witness), "continuing")
        named = time.monotonic() - began
        undo()
        return self.end(began, named)

    def end(self, began: float = 0.0, named: float = 0.0) -> Ended:
        """Wait for all commands to end.

        Args:
            began: when a fault came, on the monotonic clock.
            named: seconds until another host named it.
        """
        self.commands[1].wait(timeout=WAIT)
        closed = time.monotonic() - began
        codes = [command.wait(timeout=WAIT) for command in self.commands]
        left = left_on(*self.hosts)
        told = [self.told(rank) for rank in range(len(self.commands))]
        return Ended(codes, self.file(0, "out").read_text(), told, left, named, closed)

    def wait_until(self, happens: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, which must be before all commands end."""
        deadline = time.monotonic() + WAIT
        while not happens():
            runs = any(command.poll() is None for command in self.commands)
            assert runs or happens(), f"no {what!r} at all; {self._account()}"
            late = time.monotonic() > deadline
            assert not late, f"no {what!r} within {WAIT} s; {self._account()}"
            time.sleep(0.02)

    def _account(self) -> str:
        """Return how the commands ended, and what they have said, for people."""
        codes = [command.poll() for command in self.commands]
        told = [self.told(rank) for rank in range(len(self.commands))]
        return f"exit codes: {codes}; told: {told}; said: {self.file(0, 'out').read_text()}"

    def wait_until_told(self, rank: int, words: str) -> None:
        """Wait until a command has written words to standard error."""
        self.wait_until(lambda: words in self.told(rank), words)

    def told(self, rank: int) -> str:
        """Return what a command has written to standard error."""
        return self.file(rank, "err").read_text()

    def file(self, rank: int, suffix: str) -> Path:
        """Return the file that a command writes to: ``out`` or ``err``."""
        return self._folder / f"{self._name}-{rank}.{suffix}"


def started(
    request: pytest.FixtureRequest, pool: Executor, jobs: Jobs, long: Collection[str], folder: Path
) -> dict[str, Future[Ended]]:
    """Start the jobs that the tests of a file look at that were collected.

    Args:
        request: of a fixture of the file.
        pool: where they run.
        jobs: by name.
        long: names of those that tests marked ``long`` look at, and no others.
        folder: where they run.
    """
    collected = {
        item.get_closest_marker("long") is not None
        for item in request.session.items
        if item.path == request.path
    }
    chosen = {name: job for name, job in jobs.items() if (name in long) in collected}
    return {name: pool.submit(job, folder, name) for name, job in chosen.items()}


#: Disturbs a host; returns what undoes it as far as that can be.
Fault = Callable[[Job], Callable[[], None]]


def kill_rank(job: Job) -> Callable[[], None]:
    """Kill the first rank of host 1, but not its launcher."""
    ranks_of(job.commands[1].pid)[0].kill()
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


def kill_host_0(job: Job) -> Callable[[], None]:
    """Kill all processes of host 0."""
    job.commands[0].kill()
    _signal_all(job.hosts[0].running(), signal.SIGKILL)
    return lambda: None


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
