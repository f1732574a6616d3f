"""The parent of local ranks: starts them, watches them, and leaves nothing running.

spawn ──> watch ──┬─ every rank ended well ───────────────> 0
                  ├─ one failed ── let the others notice ── kill ── show the first ──> its code
                  ├─ more hosts join ── ask every rank to save and stop ──> 128 + SIGTERM
                  └─ a signal ──── forward it once; a second one kills ──> 128 + signal
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import IO

from shardwise.launch.errors import say, signal_name
from shardwise.launch.hosts import Share
from shardwise.launch.network import listening
from shardwise.launch.rank import STOP_SIGNALS, Ending, Report, Stage
from shardwise.launch.world import JOB, PARENT_PID, REPORT_FD, STORE_FD

POLL = 0.02  # seconds between looks at the ranks
SETTLE = 0.5  # seconds to wait after a failure, until other ranks that it affects have reported too
SAME_SIGNAL = 0.5  # seconds within which a second signal is the same Ctrl-C, delivered twice
STOP_GRACE = 30.0  # seconds for the other ranks to stop after the first one has
TAIL_LINES = 20
LOOPBACK = "127.0.0.1"
THIS_JOB = uuid.uuid4().hex  # a process launches one job, however often that is restarted


class Order(enum.Enum):
    """What the job asks of the ranks of this host."""

    CONTINUE = "continue"
    SAVE_AND_STOP = "save and stop"  # once they train, since more hosts join
    ABORT = "abort"  # at once: the job, or its generation, has ended elsewhere


class Result(enum.Enum):
    """How the ranks of a host ended."""

    COMPLETED = "completed"  # all of them, or they stopped in order
    FAILED = "failed"  # another attempt would fail too, or is not wanted
    CRASHED = "crashed"  # killed, or by an error that may not happen again
    SECONDARY = "secondary"  # only because ranks of other hosts failed first

    @property
    def is_failure(self) -> bool:
        """Whether the ranks did not end well."""
        return self is not Result.COMPLETED

    @property
    def may_restart(self) -> bool:
        """Whether another attempt may end better."""
        return self in (Result.CRASHED, Result.SECONDARY)


class StoppedBy(enum.Enum):
    """What asked the ranks of a host to stop."""

    NOTHING = "nothing"
    RANK = "rank"  # a signal to a rank, or hosts that join
    LAUNCHER = "launcher"  # a signal to the launcher itself


@dataclass(frozen=True)
class Outcome:
    """How a run of local ranks ended.

    Attributes:
        exit_code: 0, or the exit code of the rank that failed first (128 + signal for one that a
            signal killed), or 128 + signal when the run was stopped.
        result: how the ranks ended.
        stopped_by: what asked them to stop.
        farewell: over several hosts, the last words of a rank that stopped. Whether they are true
            depends on whether the job has ended.
    """

    exit_code: int
    result: Result = Result.COMPLETED
    stopped_by: StoppedBy = StoppedBy.NOTHING
    farewell: str = ""


class _Phase(enum.Enum):
    """How far the ranks are."""

    RUNNING = "running"
    REGROUPING = "regrouping"  # they were asked to save and stop, since more hosts join
    STOPPING = "stopping"  # they received the signal that asked to stop


class Launcher:
    """Runs one command as several local ranks.

    Args:
        command: program and arguments, the same for every rank.
        nproc: number of ranks.
        environ: environment of the ranks; this process's own if None.
        share: which ranks of several hosts these are; None if all of them are here.
        listener: over several hosts, where rank 0 is here: the bound socket of the store.
        order: called often while ranks run; returns what the job asks of them.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        environ: Mapping[str, str] | None = None,
        *,
        share: Share | None = None,
        listener: socket.socket | None = None,
        order: Callable[[], Order] = lambda: Order.CONTINUE,
    ) -> None:
        self._command = list(command)
        self._nproc = nproc
        self._environ = dict(os.environ if environ is None else environ)
        self._share = share
        self._listener = listener
        self._order = order
        self._ranks: list[LocalRank] = []
        self._phase = _Phase.RUNNING
        self._signals: list[int] = []
        self._first_signal_at = 0.0

    @property
    def has_stepped(self) -> bool:
        """Whether every rank has completed a step."""
        return all(rank.has_stepped for rank in self._ranks)

    def run(self) -> Outcome:
        """Start the ranks and wait for them. When this returns, no rank is running."""
        before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        try:
            # Blocked while spawning: ranks inherit the mask, and unblock the signals when they can
            # tell a stop from a crash.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            self._spawn()
            for signum in STOP_SIGNALS:
                signal.signal(signum, self._note_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            outcome = self._watch()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._signals:
            return replace(outcome, stopped_by=StoppedBy.LAUNCHER)
        if any(rank.stopped for rank in self._ranks):
            return replace(outcome, stopped_by=StoppedBy.RANK)
        return outcome

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self._signals:
            self._first_signal_at = now
        elif now - self._first_signal_at < SAME_SIGNAL:
            return
        self._signals.append(signum)

    def _spawn(self) -> None:
        # Bound here and served by rank 0, so that no other program can take the port in between.
        with self._listener or listening(LOOPBACK) as listener:
            alone = Share(0, self._nproc, LOOPBACK, listener.getsockname()[1], "lo")
            share = self._share or alone
            shared = self._shared_environment(share)
            for local in range(self._nproc):
                self._ranks.append(self._start(share.first, local, shared, listener.fileno()))

    def _shared_environment(self, share: Share) -> dict[str, str]:
        env = {
            **self._environ,
            "WORLD_SIZE": str(share.world_size),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": share.address,
            "MASTER_PORT": str(share.port),
            PARENT_PID: str(os.getpid()),
            JOB: THIS_JOB,
        }
        env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // self._nproc)))
        if sys.platform.startswith("linux") and share.interface is not None:
            # Otherwise backends look up the name of this host, which may not resolve, or may
            # resolve to an address that other hosts cannot reach.
            env.setdefault("GLOO_SOCKET_IFNAME", share.interface)
            if self._share is not None:
                env.setdefault("NCCL_SOCKET_IFNAME", share.interface)
        return env

    def _start(self, first: int, local: int, shared: Mapping[str, str], listener: int) -> LocalRank:
        rank = first + local
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
        # Rank 0 writes to the user. The output of the others is kept in case they crash.
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the rank)
        pipe, child_pipe = os.pipe()
        os.set_blocking(pipe, False)
        env[REPORT_FD] = str(child_pipe)
        inherited = [child_pipe]
        if rank == 0:
            env[STORE_FD] = str(listener)
            inherited.append(listener)
        try:
            process = subprocess.Popen(
                self._command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else output,
                stderr=None if rank == 0 else output,
                pass_fds=inherited,
            )
        finally:
            os.close(child_pipe)
        return LocalRank(rank, process, pipe, output)

    def _watch(self) -> Outcome:
        stopped_since: float | None = None
        while True:
            for rank in self._ranks:
                rank.poll()
            if any(rank.failed for rank in self._ranks):
                return self._fail()
            if all(rank.code is not None for rank in self._ranks):
                return self._finish()
            order = self._order()
            if order is Order.ABORT:
                self._kill_ranks()
                return Outcome(1)
            if len(self._signals) > 1:
                return self._kill("at once")
            self._advance(order)
            if any(rank.stopped for rank in self._ranks):
                stopped_since = stopped_since or time.monotonic()
                if time.monotonic() - stopped_since > STOP_GRACE:
                    if self._phase is _Phase.REGROUPING and not self._signals:
                        return self._end_regrouping()
                    return self._kill("without waiting for all ranks")
            time.sleep(POLL)

    def _advance(self, order: Order) -> None:
        """Ask the ranks to stop, once, if a signal or the job asks for it."""
        if self._phase is not _Phase.RUNNING:
            return
        # Ranks that have not completed a step have nothing to save, and would not stop in order.
        training = all(rank.stage is Stage.TRAINING for rank in self._ranks)
        if self._signals:
            self._phase, signum = _Phase.STOPPING, self._signals[0]
        elif order is Order.SAVE_AND_STOP and training:
            self._phase, signum = _Phase.REGROUPING, signal.SIGTERM
        else:
            return
        for rank in self._ranks:
            if rank.code is None:
                rank.process.send_signal(signum)

    def _finish(self) -> Outcome:
        stopped = [rank.report for rank in self._ranks if rank.stopped and rank.report]
        if not stopped:
            return Outcome(0)
        if self._share is not None:
            return Outcome(stopped[0].exit_code, farewell=stopped[0].text)
        say(stopped[0].text)
        return Outcome(stopped[0].exit_code)

    def _fail(self) -> Outcome:
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and any(rank.code is None for rank in self._ranks):
            time.sleep(POLL)
            for rank in self._ranks:
                rank.poll()
        for rank in self._ranks:
            rank.poll()
        failed = [rank for rank in self._ranks if rank.failed]
        secondary = all(rank.is_secondary for rank in failed)
        if secondary and self._signals:
            # These ranks lost a peer that had already stopped, as asked.
            return self._stop_early()
        if secondary and self._phase is _Phase.REGROUPING:
            return self._end_regrouping()
        first = min(failed, key=lambda rank: (rank.is_secondary, rank.failed_at))
        self._kill_ranks()
        code = _show(first, self._nproc if self._share is None else self._share.world_size)
        if secondary:
            return Outcome(code, Result.SECONDARY)
        mistakes = [rank for rank in failed if rank.report and rank.report.ending is Ending.USER]
        return Outcome(code, Result.FAILED if mistakes or self._signals else Result.CRASHED)

    def _end_regrouping(self) -> Outcome:
        # All ranks save together: where one of them has stopped, everything is saved.
        self._kill_ranks()
        return Outcome(128 + signal.SIGTERM, stopped_by=StoppedBy.RANK)

    def _stop_early(self) -> Outcome:
        self._kill_ranks()
        signum = self._signals[0]
        say(f"Stopped by {signal_name(signum)} before the first step; there was nothing to save.")
        return Outcome(128 + signum, Result.FAILED)

    def _kill(self, how: str) -> Outcome:
        self._kill_ranks()
        signum = self._signals[0] if self._signals else signal.SIGTERM
        say(f"Stopped {how} by {signal_name(signum)}; what was not saved is lost.")
        return Outcome(128 + signum, Result.FAILED)

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        # A rank that is killed cannot show the cursor again that its progress bar hid.
        with contextlib.suppress(OSError):
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")
                sys.stdout.flush()


class LocalRank:
    """One child process, with its pipe for stages and a :class:`Report`, and its output."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], pipe: int, output: IO[bytes]
    ) -> None:
        self.rank = rank
        self.process = process
        self.report: Report | None = None
        self.stage: Stage | None = None
        self.has_stepped = False
        self.ended_at = 0.0
        self._pipe = pipe
        self._received = b""
        self._output = output

    @property
    def code(self) -> int | None:
        """The exit code as Popen reports it (-9 for SIGKILL), None while the rank is running."""
        return self.process.returncode

    def poll(self) -> None:
        """Read what the rank has reported since the last call, and whether it has ended."""
        if self.code is None and self.process.poll() is not None:
            self.ended_at = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipe, 65536):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            stage = Stage.from_line(line)
            if stage is not None:
                self.stage = stage
                self.has_stepped |= stage is Stage.TRAINING
            elif self.report is None:
                self.report = Report.from_json(line)

    @property
    def failed(self) -> bool:
        """Whether this rank ended, or is about to end, with an error."""
        if self.report is not None:
            return self.report.ending is not Ending.STOPPED
        return self.code is not None and self.code != 0

    @property
    def stopped(self) -> bool:
        """Whether this rank stopped because a signal asked it to."""
        return self.report is not None and self.report.ending is Ending.STOPPED

    @property
    def is_secondary(self) -> bool:
        """Whether this rank failed only because another one failed first."""
        return self.report is not None and self.report.ending is Ending.PEER

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds on the monotonic clock."""
        return self.ended_at if self.report is None else self.report.time

    def kill(self) -> None:
        """Kill the process, and wait until it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """Return the last lines that this rank wrote; none for rank 0, which writes to our own."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 16384))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self._pipe)
        self._output.close()


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _show(rank: LocalRank, nproc: int) -> int:
    """Show the user why a rank failed; return the exit code of the run."""
    if rank.report is not None:
        if rank.report.ending is not Ending.USER:
            say(f"error: rank {rank.rank} of {nproc} failed:")
        say(rank.report.text)
        return rank.report.exit_code
    code = rank.code or 1
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if -code == signal.SIGKILL:
        how += " (the system may have run out of memory)"
    tail = rank.tail()
    if tail:
        say(tail)
    say(f"error: rank {rank.rank} of {nproc} {how}")
    return 128 - code if code < 0 else code
