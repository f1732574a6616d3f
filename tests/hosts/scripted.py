"""Jobs over any number of hosts whose ranks are small scripts: they save what they see in files.

Heartbeats are faster than usual, so that a host that is silent is lost after few seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks._hosts import Host, switched_hosts
from tests.hosts.network import left_on, start
from tests.programs import Program

WAIT = 60.0  # seconds that anything may take on a busy machine
PORT = 29415
WHERE = f"10.77.0.1:{PORT}"

# A step of it takes 20 ms. All ranks stop after the same one, as those of a training do.
_RANK = """
import signal, sys, time
from pathlib import Path
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

here, attempt = Path(sys.argv[1]), sys.argv[2]

def body(world, signals):
    stop = here / f"stop {attempt}"  # what ranks exchange at every step
    with signals.deferred():
        signals.stepped()
        (here / f"round {attempt}: rank {world.rank} of {world.size}").touch()
        while not (signals.noted or stop.exists()):
            if (here / f"end {attempt}").exists():
                return
            time.sleep(0.02)
    stop.touch()
    raise Stopped(signals.noted or signal.SIGTERM, f"Stopped in round {attempt}.")

run_rank(find_world(), body)
"""

_JOB = """
import sys
from shardwise.elastic import membership, rendezvous, restarts
from shardwise.base.errors import UserError
from shardwise.elastic.hosts import Nodes

rendezvous.SILENCE, rendezvous._GUIDING = float(sys.argv[1]), 0.2
membership.LAST_CALL, membership.STOP_GRACE = 0.2, 1.0
script, folder, nnodes, rank, where, restarts_left, timeout = sys.argv[2:]

def command(attempt):
    return [sys.executable, script, folder, str(attempt)]

try:
    nodes = Nodes.of(nnodes, None if rank == "none" else int(rank), where, float(timeout))
    sys.exit(restarts.run_job(command, 1, int(restarts_left), nodes))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Command:
    """The command of a job on one host.

    Args:
        program: the running program.
        host: where it runs.
        err: the file that it writes errors to.
    """

    def __init__(self, program: Program, host: Host, err: Path) -> None:
        self.program, self.host, self._err = program, host, err

    @property
    def told(self) -> str:
        """What it has written to standard error."""
        return self._err.read_text()

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and standard error."""
        return self.program.wait(timeout=WAIT), self.told

    def kill(self) -> None:
        """Kill all processes of the host."""
        self.program.kill()  # first, or it might report its ranks
        self.signal_all(signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the host."""
        for pid in self.host.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Job:
    """A job of one rank on each host.

    Args:
        hosts: where.
        folder: for its files.
        nnodes: the number of hosts, ``N`` or ``MIN:MAX``.
        restarts: after failures.
        ends: the rounds, counted from 0, whose ranks end at once.
        silence: seconds after which a host that is silent is lost. One that a busy machine holds up
            for half as long counts as suspended.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        folder: Path,
        nnodes: str,
        restarts: int = 1,
        ends: Sequence[int] = (),
        silence: float = WAIT,
    ) -> None:
        self.hosts, self._folder = hosts, folder
        self._nnodes, self._restarts, self._silence = nnodes, restarts, silence
        self._seen = folder / "seen"
        self._seen.mkdir(parents=True)
        (folder / "rank.py").write_text(_RANK)
        (folder / "job.py").write_text(_JOB)
        for attempt in ends:
            self.finish(attempt)
        self.commands: list[Command] = []

    @classmethod
    @contextlib.contextmanager
    def over(
        cls,
        count: int,
        folder: Path,
        nnodes: str,
        restarts: int = 1,
        ends: Sequence[int] = (),
        silence: float = WAIT,
    ) -> Iterator[Job]:
        """Start a job with host i on the i-th of new hosts; wait until the ranks have started."""
        with switched_hosts(count) as hosts:
            job = cls(hosts, folder, nnodes, restarts, ends, silence)
            for rank in range(count):
                job.start(rank, rank)
            job.wait_for(0, count)
            yield job

    def start(
        self,
        place: int,
        rank: int | None = None,
        *,
        where: str = WHERE,
        timeout: float = WAIT,
        env: Mapping[str, str] | None = None,
    ) -> Command:
        """Start the command on a host."""
        err = self._folder / f"{len(self.commands)}.err"
        arguments = [str(self._silence), str(self._folder / "rank.py"), str(self._seen)]
        arguments += [self._nnodes, "none" if rank is None else str(rank), where]
        arguments += [str(self._restarts), str(timeout)]
        env = {**(env or {}), "PYTHONPATH": str(self._folder)}
        with err.open("w") as file:
            program = start(self.hosts[place], "job", *arguments, env=env, out=file, err=file)
        self.commands.append(Command(program, self.hosts[place], err))
        return self.commands[-1]

    def finish(self, attempt: int) -> None:
        """Let the ranks of a round end well."""
        (self._seen / f"end {attempt}").touch()

    def has_begun(self, attempt: int, size: int) -> bool:
        """Whether all ranks of a round have started."""
        begun = {path.name for path in self._seen.glob(f"round {attempt}: *")}
        return {f"round {attempt}: rank {rank} of {size}" for rank in range(size)} <= begun

    def rounds(self) -> set[str]:
        """Return which ranks have started."""
        return {path.name.removeprefix("round ") for path in self._seen.glob("round *")}

    def wait_for(self, attempt: int, size: int) -> None:
        """Wait until all ranks of a round have started."""
        self.wait_until(lambda: self.has_begun(attempt, size), f"round {attempt} of {size}")

    def wait_until(self, happens: Callable[[], object], what: str) -> None:
        """Wait until a condition holds, while a command runs."""
        deadline = time.monotonic() + WAIT
        while not happens():
            runs = any(command.program.poll() is None for command in self.commands)
            told = "\n--\n".join(command.told for command in self.commands)
            assert runs and time.monotonic() < deadline, f"no {what}: {self.rounds()}\n{told}"
            time.sleep(0.02)

    def ended(self) -> list[tuple[int, str]]:
        """Wait for the end of all commands; return the exit code and standard error of each."""
        ended = [command.end() for command in self.commands]
        assert not left_on(*self.hosts), "ranks outlived their launcher"
        return ended
