"""The launcher of replicas that are worlds of their own: each is started again by itself.

A world ends when one of its ranks does. Then its other ranks are killed, and it is started again
while the other worlds go on. Once a world has ended well, the training is complete: those that are
not there at the end are not started again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.elastic.agent import POLL, SETTLE, LocalRank, Signals, are_settled, how_failed
from shardwise.elastic.errors import say, signal_name
from shardwise.elastic.hosts import Command
from shardwise.elastic.network import interface_towards, listening
from shardwise.elastic.outcome import STOP_GRACE
from shardwise.elastic.rank import STOP_SIGNALS, Ending
from shardwise.elastic.store import serve_ranks
from shardwise.elastic.world import JOB, LOST, PARENT_PID, REPORT, ReplicaWorld, usable_cores

_HERE = "127.0.0.1"
_DEATH = 30.0  # seconds that a process may take to die of SIGKILL
_LEAST_GRACE = 60.0  # seconds for the others to end, once one has


class _World:
    """One start of a replica.

    Args:
        replica: which one.
        command: of a rank.
        ranks: how many.
        folder: for files of this start.
        environment: variables of all ranks.
        shown: whether its first rank writes to our own output.
    """

    def __init__(
        self,
        replica: ReplicaWorld,
        command: Sequence[str],
        ranks: int,
        folder: Path,
        environment: Mapping[str, str],
        shown: bool,
    ) -> None:
        self.replica = replica
        # The ranks find each other here; it serves this start alone.
        self._store = serve_ranks(_HERE, listening(_HERE))
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[LocalRank] = []
        for rank in range(ranks):
            own = folder / f"{replica.number}-{replica.restarts}-{rank}"
            own.mkdir()
            (own / "report").touch()
            env = {
                **os.environ,
                **environment,
                **replica.environment(),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": _HERE,
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(True),
                REPORT: str(own / "report"),
            }
            with contextlib.ExitStack() as files:
                out = err = None
                if not (shown and rank == 0):
                    out = files.enter_context((own / "stdout").open("wb"))
                    err = files.enter_context((own / "stderr").open("wb"))
                process = subprocess.Popen(
                    list(command), env=env, stdout=out, stderr=err, start_new_session=True
                )
            self._processes.append(process)
            self.ranks.append(LocalRank(rank, process.pid, own))

    @property
    def pids(self) -> list[int]:
        """The processes of its ranks."""
        return [process.pid for process in self._processes]

    def poll(self) -> None:
        """Look at all ranks."""
        for rank in self.ranks:
            rank.poll()

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have ended well, or others know of one that has not."""
        failed = [rank for rank in self.ranks if rank.failed]
        if failed:
            return are_settled(self.ranks, failed, SETTLE)
        return all(rank.code is not None for rank in self.ranks)

    @property
    def failure(self) -> LocalRank | None:
        """The rank that failed first, if one did."""
        failed = [rank for rank in self.ranks if rank.failed]
        return min(failed, key=lambda rank: (rank.is_secondary, rank.failed_at), default=None)

    @property
    def has_stopped(self) -> bool:
        """Whether it ended because a signal asked it to."""
        return self.failure is None and any(rank.stopped for rank in self.ranks)

    def send(self, signum: int) -> None:
        """Send a signal to all ranks."""
        for rank in self.ranks:
            rank.send(signum)

    def end(self) -> None:
        """Kill what still runs, and free what belongs to this start."""
        self.send(signal.SIGKILL)
        for rank, process in zip(self.ranks, self._processes, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(time.monotonic() + _DEATH)
                process.wait(_DEATH)
            rank.close()


class ReplicaLauncher:
    """Runs one command as the ranks of several replicas, each a world of its own.

    Args:
        command: gives the program and arguments of a start, the same for every rank.
        replica: the first one, not yet restarted.
        ranks: of each replica.
        restarts: how often each replica may be started again.
        started: called with the replica and its processes.
        lost: called with the replica and the reason.
    """

    def __init__(
        self,
        command: Command,
        replica: ReplicaWorld,
        ranks: int,
        restarts: int,
        *,
        started: Callable[[ReplicaWorld, list[int]], object],
        lost: Callable[[ReplicaWorld, str], object],
    ) -> None:
        self._command = command
        self._first = replica
        self._ranks = ranks
        self._restarts = restarts
        self._started = started
        self._lost = lost
        self._worlds: dict[int, _World] = {}
        self._codes: dict[int, int] = {}
        self._in_round: set[int] = set()  # replicas that were in the last round since they started
        self._round_at = 0.0
        self._grace: float | None = None  # when those that still run after the end are killed
        self._stop_by: float | None = None  # the same, after a signal
        self._has_said_farewell = False
        self.finished: set[int] = set()

    def made_round(self, members: Sequence[int]) -> None:
        """Note who was in the last round. Other threads may call it."""
        self._in_round, self._round_at = set(members), time.monotonic()

    def run(self) -> int:
        """Run all replicas to their end.

        Returns:
            The exit code: 0 if any has completed the training.
        """
        with contextlib.ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-")))
            signals = held.enter_context(contextlib.closing(Signals()))
            held.callback(self._end_all)
            job = uuid.uuid4().hex
            for number in range(self._first.count):
                self._start(replace(self._first, number=number), folder, job, "")
            forwarded = False
            while self._worlds:
                time.sleep(POLL)
                for world in list(self._worlds.values()):
                    world.poll()
                    if world.has_ended:
                        self._ended(world, folder, job, bool(signals.noted))
                if len(signals.noted) > 1:
                    say(f"Stopped at once by {signal_name(signals.noted[0])}.")
                    return 128 + signals.noted[0]
                if signals.noted and self._is_stop_over():
                    say("Stopped without waiting for all replicas.")
                    return 128 + signals.noted[0]
                if signals.noted and not forwarded:
                    forwarded = True
                    for world in self._worlds.values():
                        world.send(signals.noted[0])
                self._end_stragglers()
            if signals.noted:
                return 128 + signals.noted[0]
        if self.finished:
            return 0
        return next((code for _, code in sorted(self._codes.items()) if code), 1)

    def _is_stop_over(self) -> bool:
        """Whether a replica has stopped as asked, and others have had the time to."""
        if self._stop_by is None and len(self._worlds) < self._first.count:
            self._stop_by = time.monotonic() + STOP_GRACE
        return self._stop_by is not None and time.monotonic() > self._stop_by

    def _end_all(self) -> None:
        for world in self._worlds.values():
            world.end()

    def _start(self, replica: ReplicaWorld, folder: Path, job: str, lost: str) -> None:
        total = self._ranks * replica.count
        environment = {
            PARENT_PID: str(os.getpid()),
            JOB: job,
            LOST: lost,
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, usable_cores() // total))
            ),
        }
        interface = interface_towards(_HERE)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            environment["GLOO_SOCKET_IFNAME"] = interface
        # Blocked while ranks start: they unblock them when they can tell a stop from a crash.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            world = _World(
                replica,
                self._command(replica.restarts),
                self._ranks,
                folder,
                environment,
                shown=replica.number == 0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._in_round.discard(replica.number)
        self._worlds[replica.number] = world
        self._started(replica, world.pids)

    def _ended(self, world: _World, folder: Path, job: str, stopping: bool) -> None:
        replica = world.replica
        world.end()
        del self._worlds[replica.number]
        failure = world.failure
        if failure is None:
            if world.has_stopped:
                words = next(r.report for r in world.ranks if r.report is not None)
                if not self._has_said_farewell:
                    self._has_said_farewell = True
                    say(words.text)
                self._codes[replica.number] = words.exit_code
            else:
                self.finished.add(replica.number)
            return
        why = how_failed(failure)
        self._codes[replica.number] = failure.code if failure.code else 1
        if self._codes[replica.number] < 0:
            self._codes[replica.number] = 128 - self._codes[replica.number]
        self._lost(replica, why)
        if stopping or self.finished:
            return
        mistaken = failure.report is not None and failure.report.ending is Ending.USER
        if mistaken or replica.restarts >= self._restarts:
            if failure.report is not None:
                say(f"replica {replica.number}: {failure.report.text}")
                self._codes[replica.number] = failure.report.exit_code
            elif tail := failure.tail():
                say(tail)
            limit = "" if mistaken else f" (--max-restarts {self._restarts})"
            say(f"replicas   replica {replica.number} is not started again{limit}")
            return
        again = replace(replica, restarts=replica.restarts + 1)
        self._start(again, folder, job, f"replica {replica.number} {why}")

    def _end_stragglers(self) -> None:
        """End those that cannot bring anything to the result any more."""
        if not self.finished:
            return
        now = time.monotonic()
        if self._grace is None:
            self._grace = now + _LEAST_GRACE + 2 * (now - self._round_at)
        for number, world in list(self._worlds.items()):
            if number not in self._in_round or now > self._grace:
                say(f"replicas   replica {number} was not there at the end, and is ended")
                world.end()
                del self._worlds[number]
