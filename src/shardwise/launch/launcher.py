"""The parent of local ranks: starts them, watches them, and leaves nothing running.

spawn ──> watch ──┬─ every rank ended well ───────────────> 0
                  ├─ one failed ── let the others notice ── kill ── show the first ──> its code
                  ├─ more hosts join ── ask every rank to save and stop ──> 128 + SIGTERM
                  └─ a signal ──── forward it once; a second one kills ──> 128 + signal
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

from shardwise.launch.errors import say, signal_name
from shardwise.launch.hosts import Share
from shardwise.launch.network import listening
from shardwise.launch.rank import STOP_SIGNALS, Ending, Report, Stage
from shardwise.launch.world import JOB, PARENT_PID, REPORT_FD, STORE_FD

POLL = 0.02  # seconds between looks at the ranks
SETTLE = 0.5  # after a failure: seconds for its traces on other ranks to show
ECHO = 0.5  # seconds within which a second signal is the same Ctrl-C, come by another way
STOP_GRACE = 30.0  # after one rank has stopped: seconds for the others to do so
LOOPBACK = "127.0.0.1"
THIS_JOB = uuid.uuid4().hex  # a process launches one job, however often that begins again


class Launcher:
    """Runs one command as several local ranks.

    Args:
        command: program and arguments, the same for every rank.
        nproc: number of ranks.
        environ: environment of the ranks; this process's own where None.
        share: which ranks of several hosts these are; None: all of them are here.
        listener: where rank 0 is here, and hosts are several: bound, for the store.
        is_over: asked often while ranks run: whether the job has ended elsewhere.
        regroups: asked often, too: whether the ranks shall save and stop once they train, since
            more hosts join.
    """

    def __init__(
        self,
        command: Sequence[str],
        nproc: int,
        environ: Mapping[str, str] | None = None,
        *,
        share: Share | None = None,
        listener: socket.socket | None = None,
        is_over: Callable[[], bool] = lambda: False,
        regroups: Callable[[], bool] = lambda: False,
    ) -> None:
        self._command = list(command)
        self._nproc = nproc
        self._environ = dict(os.environ if environ is None else environ)
        self._ranks: list[LocalRank] = []
        self._signals: list[int] = []
        self._first_signal_at = 0.0
        self._share = share
        self._listener = listener
        self._is_over = is_over
        self._regroups = regroups
        self._regrouping = False  # the ranks were asked to stop, since more hosts join
        self._cut_short = False  # some did not come to an end by themselves
        self.farewell = ""
        self.failed = False
        self.echo = False
        self.may_restart = False

    @property
    def stopped(self) -> bool:
        """Whether a signal asked this launcher, or one of its ranks, to stop."""
        asked = self.signalled or self._cut_short
        return asked or any(rank.stopped for rank in self._ranks)

    @property
    def signalled(self) -> bool:
        """Whether a signal asked this launcher itself to stop."""
        return bool(self._signals)

    @property
    def training(self) -> bool:
        """Whether every rank has made a step, and makes more: asked to stop now, they save."""
        return all(rank.stage is Stage.TRAINING for rank in self._ranks)

    @property
    def stepped(self) -> bool:
        """Whether every rank has made a step."""
        return all(rank.stepped for rank in self._ranks)

    def run(self) -> int:
        """Start the ranks and wait for them.

        Returns:
            0, or the exit code of the rank that failed first (128 + signal for one that a signal
            killed), or 128 + signal when the run was stopped. By then no rank is running.
            ``failed`` says whether it ended badly, as against having been stopped in order;
            ``echo`` whether only because ranks of other hosts went first; ``may_restart`` whether
            another attempt may end better: a rank was killed, crashed or lost a peer, as against a
            mistake of its user. Over several hosts ``farewell`` is what a rank that stopped had to
            say, which may be the end of the job or not.
        """
        before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        try:
            # Blocked while spawning: the mask passes to the ranks, which unblock when they can
            # tell a stop from a crash.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            self._spawn()
            for signum in STOP_SIGNALS:
                signal.signal(signum, self._note_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            return self._watch()
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.close()
            for signum, handler in before.items():
                signal.signal(signum, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _note_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self._signals:
            self._first_signal_at = now
        elif now - self._first_signal_at < ECHO:
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
            # Else backends look up the name of this host, which need not resolve, or to what
            # other hosts cannot reach.
            env.setdefault("GLOO_SOCKET_IFNAME", share.interface)
            if self._share is not None:
                env.setdefault("NCCL_SOCKET_IFNAME", share.interface)
        return env

    def _start(self, first: int, local: int, shared: Mapping[str, str], listener: int) -> LocalRank:
        rank = first + local
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
        # Rank 0 speaks to the user. The others' output is kept for the case that they crash.
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

    def _watch(self) -> int:
        forwarded = False
        stopped_since: float | None = None
        while True:
            self._look()
            if any(rank.failed for rank in self._ranks):
                return self._fail()
            if all(rank.code is not None for rank in self._ranks):
                return self._finish()
            if self._is_over():
                return self._end_with_the_job()
            if len(self._signals) > 1:
                return self._kill("at once")
            if not self._signals and self._regroups() and self.training:
                self._regrouping = True
            if (self._signals or self._regrouping) and not forwarded:
                forwarded = True
                self._forward(self._signals[0] if self._signals else signal.SIGTERM)
            if any(rank.stopped for rank in self._ranks):
                stopped_since = stopped_since or time.monotonic()
                if time.monotonic() - stopped_since > STOP_GRACE:
                    if self._regrouping and not self._signals:
                        return self._end_regrouping()
                    return self._kill("without waiting for all ranks")
            time.sleep(POLL)

    def _forward(self, signum: int) -> None:
        for rank in self._ranks:
            if rank.code is None:
                rank.process.send_signal(signum)

    def _look(self) -> None:
        for rank in self._ranks:
            rank.look()

    def _finish(self) -> int:
        stopped = [rank.report for rank in self._ranks if rank.stopped and rank.report]
        if not stopped:
            return 0
        if self._share is not None:
            self.farewell = stopped[0].text
        else:
            say(stopped[0].text)
        return stopped[0].exit_code

    def _kill_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        restore_cursor()

    def _end_with_the_job(self) -> int:
        self._kill_ranks()
        return 1

    def _kill(self, how: str) -> int:
        self.failed = True
        self._kill_ranks()
        signum = self._signals[0] if self._signals else signal.SIGTERM
        say(f"Stopped {how} by {signal_name(signum)}; what was not saved is lost.")
        return 128 + signum

    def _fail(self) -> int:
        deadline = time.monotonic() + SETTLE
        while time.monotonic() < deadline and any(rank.code is None for rank in self._ranks):
            time.sleep(POLL)
            self._look()
        self._look()
        failed = [rank for rank in self._ranks if rank.failed]
        echo = all(rank.is_echo for rank in failed)
        if echo and self._regrouping and not self._signals:
            return self._end_regrouping()
        self.failed = True
        if echo and self._signals:
            # Ranks that lost a peer because it had stopped already, as asked.
            return self._stop_early()
        self.echo = echo
        self.may_restart = not self._signals and all(
            rank.report is None or rank.report.ending is not Ending.USER for rank in failed
        )
        first = min(failed, key=lambda rank: (rank.is_echo, rank.failed_at))
        self._kill_ranks()
        return _show(first, self._nproc if self._share is None else self._share.world_size)

    def _end_regrouping(self) -> int:
        # Saving is what all ranks do together: where one has stopped, all is saved.
        self._cut_short = True
        self._end_with_the_job()
        return 128 + signal.SIGTERM

    def _stop_early(self) -> int:
        self._kill_ranks()
        signum = self._signals[0]
        say(f"Stopped by {signal_name(signum)} before the first step; there was nothing to save.")
        return 128 + signum


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _show(rank: LocalRank, nproc: int) -> int:
    """Tell the user why a rank failed; return the exit code of the run."""
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


TAIL_LINES = 20


class LocalRank:
    """One child process, its pipe for a :class:`Report` and its output."""

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], pipe: int, output: IO[bytes]
    ) -> None:
        self.rank = rank
        self.process = process
        self.report: Report | None = None
        self.stage: Stage | None = None
        self.stepped = False
        self.ended_at = 0.0
        self._pipe = pipe
        self._received = b""
        self._output = output

    @property
    def code(self) -> int | None:
        """The exit code as Popen has it (-9 for SIGKILL), None while running."""
        return self.process.returncode

    def look(self) -> None:
        """Take in what happened since the last look."""
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
                self.stepped |= stage is Stage.TRAINING
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
    def is_echo(self) -> bool:
        """Whether this rank failed only because another one went first."""
        return self.report is not None and self.report.ending is Ending.PEER

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds on the monotonic clock."""
        return self.ended_at if self.report is None else self.report.time

    def kill(self) -> None:
        """End it now, and wait until it has gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def tail(self) -> str:
        """The last lines that this rank wrote (nothing for rank 0, which writes to our own)."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 16384))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def close(self) -> None:
        """Give back its descriptors."""
        os.close(self._pipe)
        self._output.close()


def restore_cursor() -> None:
    """A rank that is killed cannot show the cursor again that its progress bar hid."""
    with contextlib.suppress(OSError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")
            sys.stdout.flush()
