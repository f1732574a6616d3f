"""The parent of local ranks, on torch's elastic agent: it watches them, and leaves nothing running.

    rendezvous ──> start ──> watch ──┬─ every rank ended well
        ^                            ├─ one failed: let the others notice, kill, show the first
        │                            ├─ more hosts join: ask every rank to save and stop
        │                            └─ a signal: forward it once; a second one kills
        └── another generation <──────── what follows (membership.py)

torch's agent starts the processes, holds the loop and meets the other hosts through a rendezvous
handler, ours. What is added here is how ranks are watched: torch's agent ends the other ranks at
once when one has failed, before it is known which was first, and gives ranks that save no time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from shardwise._torch.elastic import LocalAgent
from shardwise.base import plain
from shardwise.base.errors import UserError
from shardwise.base.say import say
from shardwise.base.units import printable
from shardwise.elastic.clock import Timers, process_clock
from shardwise.elastic.errors import signal_name
from shardwise.elastic.fork_server import ForkServer
from shardwise.elastic.hosts import Command, OnJoin
from shardwise.elastic.membership import SECONDARY, Next, Verdict
from shardwise.elastic.memory_folder import delete_memory
from shardwise.elastic.network import interface_towards
from shardwise.elastic.outcome import STOP_GRACE, Outcome, Result, StoppedBy
from shardwise.elastic.output import NewLines, RankOutput, Shown
from shardwise.elastic.rank import (
    MOVES_ON,
    STOP_SIGNALS,
    WORLD_FILE,
    Ending,
    RankReport,
    Stage,
)
from shardwise.elastic.rendezvous import Order, Rendezvous
from shardwise.elastic.starting import STACKS, StartWatch
from shardwise.elastic.world import (
    EARLY,
    JOB,
    LOST,
    PARENT_PID,
    REPORT,
    STAYS,
    environment,
    threads_of_a_rank,
)

POLL = 0.02  # seconds between looks at the ranks
SETTLE = 0.5  # seconds to wait after a failure, until other ranks that it affects have reported too
SAME_SIGNAL = 0.5  # seconds within which a second signal is the same Ctrl-C, delivered twice
_FIRST = Shown()  # rank 0 writes to the user
_DEATH = 30.0  # seconds that a process may take to die of SIGKILL


class Signals:
    """The stop signals of this process, noted from the construction until :meth:`close`.

    Attributes:
        noted: the signals.
        counts_later: whether the first one waits until ranks have completed a step.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.counts_later = False
        self._first_at = 0.0
        self._before = {signum: signal.signal(signum, self._note) for signum in STOP_SIGNALS}

    @property
    def end_waiting(self) -> bool:
        """Whether to wait for other hosts no longer."""
        return len(self.noted) > self.counts_later

    def close(self) -> None:
        """Restore the handlers."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if not self.noted:
            self._first_at = now
        elif now - self._first_at < SAME_SIGNAL:
            return
        self.noted.append(signum)


class Agent(LocalAgent):
    """Runs one command as the ranks of this host.

    Args:
        command: gives the program and arguments of a generation, the same for every rank.
        rendezvous: where the hosts meet.
        signals: what asks to stop.
        shown: what of the output of ranks is shown.

    Attributes:
        meeting: where the hosts meet.
        signals: as passed.
        ranks: of this host, in this generation.
        logs: where they write, and their environment.
    """

    def __init__(
        self, command: Command, rendezvous: Rendezvous, signals: Signals, shown: Shown = _FIRST
    ) -> None:
        self._spec = WorkerSpec(
            role="default",
            local_world_size=rendezvous.nproc,
            rdzv_handler=rendezvous,
            entrypoint=command(0)[0],
            max_restarts=0,  # it is the rules of the membership that count
            monitor_interval=POLL,
        )
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-")
        self.logs = _RankLogs(Path(self._folder.name), rendezvous, shown)
        super().__init__(self._spec, self.logs, exit_barrier_timeout=5.0)
        self._command = command
        self.meeting = rendezvous
        self.signals = signals
        self.ranks: list[LocalRank] = []
        self._starting = StartWatch(self.ranks, self._say)
        self._timers = Timers(process_clock().now)
        self._asked = False  # whether the ranks were asked to stop
        self._has_shown = False  # how this generation has ended
        self._outcome: Outcome | None = None

    def run_job(self) -> int:
        """Run the ranks of this host from the first generation to the last.

        Returns:
            The exit code. When this returns, no rank is running.

        Raises:
            UserError: the hosts did not come together, or were lost.
        """
        try:
            nodes = self.meeting.nodes
            if nodes.is_elastic and nodes.on_join is OnJoin.STAY:
                self.logs.more[STAYS] = "1"
                self._start_early()
            self.run()
        finally:
            self._kill_ranks()
            for rank in self.ranks:
                rank.close()
            self.meeting.shutdown()
            self._folder.cleanup()
            delete_memory(self.meeting.job_id)
        verdict, outcome = self.meeting.verdict, self._outcome
        if verdict is None and outcome is not None and outcome.exit_code:
            return outcome.exit_code
        if outcome is None or verdict is None or verdict.next.begins_again:
            awaited = "ranks to start" if self.meeting.is_alone else "the other hosts"
            self._say(f"Stopped while waiting for {awaited}.")
            return 128 + self._signum
        return outcome.exit_code or (1 if verdict.text else 0)

    # -- what torch's agent asks for ---------------------------------------------------------------

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the ranks, unless they wait for their next world."""
        verdict = self.meeting.verdict
        if verdict is None or verdict.next is not Next.REGROUP or not self._are_waiting:
            super().stop_workers(worker_group)
        else:
            self.signals.counts_later = self._hold_unsaved

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks, or move those on that wait."""
        self._asked, self._outcome, self._has_shown = False, None, False
        self._timers = Timers(process_clock().now)
        begin = self._move_on if self._are_waiting else self._start_ranks
        pids = begin(worker_group)
        self._starting = StartWatch(self.ranks, self._say)
        return pids

    def fork(self, environment: Mapping[str, str], output: Sequence[int]) -> int | None:
        """Fork a rank from a process that has imported what it needs, if there is one."""
        if not isinstance(self._command, ForkServer):
            return None
        return self._command.fork(environment, output, lambda: bool(self.signals.noted))

    def _start_ranks(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes of a world."""
        for rank in self.ranks:
            rank.close()
        self.ranks = []
        spec, generation = worker_group.spec, self.meeting.generation
        spec.entrypoint, *arguments = self._command(generation)
        spec.args = tuple(arguments)
        # Blocked while ranks start: they inherit the mask, and unblock the signals when they can
        # tell a stop from a crash.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pids = super().start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self.ranks = [
            LocalRank(
                worker.global_rank,
                pids[worker.local_rank],
                self.logs.of(worker.local_rank),
                self.logs.outputs[worker.local_rank],
            )
            for worker in worker_group.workers
        ]
        return pids

    def _start_early(self) -> None:
        """Start ranks before their world is known: other hosts train while they import.

        This host says that it waits when its ranks do. One that fails before ends its command.
        """
        nodes = self.meeting.nodes
        group: Any = WorkerGroup(self._spec)
        group.store, group.master_addr, group.master_port = HashStore(), "", 0
        for worker in group.workers:
            worker.global_rank = max(nodes.rank, 0) * self.meeting.nproc + worker.local_rank
            worker.world_size = worker.global_rank + 1
        self.logs.more[EARLY] = "1"
        self.start_workers(group)
        del self.logs.more[EARLY]

        def wait() -> None:
            while not (self._are_waiting or self.signals.end_waiting):
                time.sleep(POLL)
                for rank in self.ranks:
                    rank.poll()
                for rank in (each for each in self.ranks if each.failed):
                    self._tell_failed(rank)
                    error = UserError(f"rank {rank.rank} {how_failed(rank)}, before it took part")
                    error.exit_code = rank.exit_code
                    raise error

        self.meeting.before_waiting = wait

    def _move_on(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Give ranks that wait their places in the next world."""
        self.signals.counts_later = False
        self.meeting.before_waiting = lambda: None
        for worker, rank in zip(worker_group.workers, self.ranks, strict=True):
            rank.move_on(
                worker.global_rank,
                {
                    "RANK": str(worker.global_rank),
                    "GROUP_RANK": str(worker_group.group_rank),
                    "ROLE_RANK": str(worker.role_rank),
                    "WORLD_SIZE": str(worker.world_size),
                    "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                    "ROLE_WORLD_SIZE": str(worker.role_world_size),
                    "MASTER_ADDR": str(worker_group.master_addr),
                    "MASTER_PORT": str(worker_group.master_port),
                    "TORCHELASTIC_RESTART_COUNT": str(self.meeting.generation),
                    JOB: self.meeting.job_id,
                    LOST: self.logs.lost,
                },
            )
        return {worker.local_rank: worker.id for worker in worker_group.workers}

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks and at what the other hosts report, and say what follows."""
        order = self.meeting.order()
        if self._outcome is None:
            self._outcome = self._watch(order)
            if all(rank.has_stepped for rank in self.ranks):
                self.meeting.report_step()
            if self._outcome is not None:
                self.meeting.end(self._outcome)
        verdict = self.meeting.verdict
        if verdict is None or self._outcome is None:
            if self._outcome is not None and len(self.signals.noted) > 1:
                return RunResult(WorkerState.FAILED)  # no reason is left to wait for other hosts
            return RunResult(WorkerState.HEALTHY)
        if not self._has_shown:
            self._has_shown = True
            self._show_verdict(self._outcome, verdict)
        if verdict.next.begins_again and (self._hold_unsaved or not self.signals.noted):
            return RunResult(WorkerState.HEALTHY)  # and the rendezvous asks for the next generation
        if verdict.next is Next.END and not self._outcome.result.is_failure:
            ended = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=ended)
        return RunResult(WorkerState.FAILED)

    def before_shutdown(self) -> None:
        """Kill the ranks that still run."""
        # Ranks that torch's agent is still to stop have nothing to save: they would have ended.
        self._kill_ranks()

    def _say(self, text: str) -> None:
        """Tell the user."""
        say(text)

    @property
    def _signum(self) -> int:
        """The signal that asked to stop; that of the job if none did."""
        return self.signals.noted[0] if self.signals.noted else signal.SIGTERM

    @property
    def _is_regrouping(self) -> bool:
        """Whether the ranks were asked to save and stop since more hosts join."""
        return self._asked and not self.signals.noted

    @property
    def _are_waiting(self) -> bool:
        """Whether all ranks wait for their next world, with what they have in memory."""
        return bool(self.ranks) and all(rank.is_waiting for rank in self.ranks)

    @property
    def _hold_unsaved(self) -> bool:
        """Whether the ranks wait with what is saved nowhere."""
        return self._are_waiting and not any(rank.stopped for rank in self.ranks)

    # -- the ranks ---------------------------------------------------------------------------------

    def _watch(self, order: Order) -> Outcome | None:
        """Look at the ranks; return how they ended, or None while they run."""
        for rank in self.ranks:
            rank.poll()
        if failed := [rank for rank in self.ranks if self._has_failed(rank)]:
            at_once = order is Order.ABORT or len(self.signals.noted) > 1
            limit = SECONDARY if self._lacks_cause(failed) else SETTLE
            if at_once or are_settled(self.ranks, failed, limit):
                return self._by_signal(self._fail(failed))
            return None
        if all(rank.code is not None for rank in self.ranks):
            return self._by_signal(self._finish())
        if order is Order.ABORT:
            self._kill_ranks()
            return Outcome(1)
        if len(self.signals.noted) > 1:
            return self._by_signal(self._kill("at once by {}; what was not saved is lost"))
        if self._hold_unsaved:
            return Outcome(128 + signal.SIGTERM, stopped_by=StoppedBy.RANK)
        if all(rank.code is not None or rank.is_waiting for rank in self.ranks):
            if not self._are_waiting:  # a signal has stopped the others
                self._kill_ranks()
            return self._by_signal(self._finish())
        self._ask_to_stop(order)
        self._starting.look()
        has_stopped = any(self._has_stopped(rank) for rank in self.ranks)
        if self._timers.elapsed("stopped", has_stopped) > STOP_GRACE and has_stopped:
            if self._is_regrouping:
                return self._end_regrouping()
            how = "without waiting for all ranks by {}; what was not saved is lost"
            return self._by_signal(self._kill(how))
        return None

    def _by_signal(self, outcome: Outcome) -> Outcome:
        if self.signals.noted:
            interrupted = self.signals.noted[0] == signal.SIGINT
            by = StoppedBy.INTERRUPT if interrupted else StoppedBy.TERMINATE
            return replace(outcome, stopped_by=by)
        if any(self._has_stopped(rank) for rank in self.ranks):
            return replace(outcome, stopped_by=StoppedBy.RANK)
        return outcome

    def _has_stopped(self, rank: LocalRank) -> bool:
        """Whether a rank stopped as asked: it said so, or died of the signal that it was sent."""
        return rank.stopped or (self._asked and rank.report is None and rank.code in _STOPPED)

    def _has_failed(self, rank: LocalRank) -> bool:
        return rank.failed and not self._has_stopped(rank)

    def _ask_to_stop(self, order: Order) -> None:
        """Ask the ranks to stop, once, if a signal or the job asks for it."""
        # Ranks that have not completed a step have nothing to save, and would not stop in order.
        training = all(rank.stage is Stage.TRAINING for rank in self.ranks)
        is_due = self.signals.noted or (order is Order.SAVE_AND_STOP and training)
        if is_due and not self._asked:
            self._asked = True
            moves_on = not self.signals.noted and self.meeting.nodes.on_join is OnJoin.STAY
            for rank in self.ranks:
                rank.send(MOVES_ON if moves_on else self._signum)

    def _finish(self) -> Outcome:
        self._show_rest()
        words = [rank.report for rank in self.ranks if rank.stopped and rank.report]
        if words:
            return Outcome(words[0].exit_code, farewell=words[0].text)
        if any(self._has_stopped(rank) for rank in self.ranks):
            text = f"Stopped by {signal_name(self._signum)}."
            return Outcome(128 + self._signum, farewell=text)
        return Outcome(0)

    def _fail(self, failed: list[LocalRank]) -> Outcome:
        secondary = all(rank.is_secondary for rank in failed)
        if secondary and self.signals.noted:
            # These ranks lost a peer that had already stopped, as asked.
            return self._kill("by {} before the first step; there was nothing to save")
        if secondary and self._is_regrouping:
            return self._end_regrouping()
        first = min(failed, key=lambda rank: (rank.is_secondary, rank.failed_at))
        self._kill_ranks()
        self._tell_failed(first)
        if secondary:
            return Outcome(first.exit_code, Result.SECONDARY)
        mistakes = [rank for rank in failed if rank.report and rank.report.ending is Ending.USER]
        final = mistakes or self.signals.noted
        return Outcome(first.exit_code, Result.FAILED if final else Result.CRASHED)

    def _tell_failed(self, rank: LocalRank) -> None:
        """Tell the user, and the next generation of ranks, which rank failed first."""
        self.logs.lost = f"rank {rank.rank} {how_failed(rank)}"
        of = f"error: rank {rank.rank} of {self.meeting.nproc * self.meeting.hosts}"
        if rank.report is not None:
            if rank.report.ending is not Ending.USER:
                self._say(f"{of} failed:")
            self._say(rank.report.text)
            return
        if tail := rank.output.tail():
            self._say(tail)
        killed = rank.code == -signal.SIGKILL
        memory = " (the system may have run out of memory)" if killed else ""
        self._say(f"{of} {how_failed(rank)}{memory}")

    def _lacks_cause(self, failed: list[LocalRank]) -> bool:
        """Whether ranks here were affected by another one here, which has not reported yet."""
        runs = any(rank.code is None and rank.report is None for rank in self.ranks)
        is_here = self.meeting.hosts == 1  # else the other hosts are asked, see membership.py
        is_asked = self._asked or bool(self.signals.noted)
        return runs and is_here and not is_asked and all(rank.is_secondary for rank in failed)

    def _end_regrouping(self) -> Outcome:
        # All ranks save together: where one of them has stopped, everything is saved.
        self._kill_ranks()
        return Outcome(128 + signal.SIGTERM, stopped_by=StoppedBy.RANK)

    def _kill(self, how: str) -> Outcome:
        self._kill_ranks()
        self._say(f"Stopped {how.format(signal_name(self._signum))}.")
        return Outcome(128 + self._signum, Result.FAILED)

    def _kill_ranks(self) -> None:
        killed = [rank for rank in self.ranks if rank.code is None]
        for rank in killed:
            rank.send(signal.SIGKILL)
        deadline = time.monotonic() + _DEATH
        for rank in killed:
            rank.wait(deadline)
        self._show_rest()
        # A rank that is killed cannot show the cursor again that its progress bar hid.
        if killed:
            with contextlib.suppress(OSError):
                if sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h\n")
                    sys.stdout.flush()

    def _show_rest(self) -> None:
        for rank in self.ranks:
            rank.output.show_rest()

    def _show_verdict(self, outcome: Outcome, verdict: Verdict) -> None:
        """Say how the generation ended and what follows."""
        # A rank says that the job has stopped; say so only if it has.
        if outcome.farewell and verdict.next in (Next.END, Next.FAIL):
            self._say(outcome.farewell)
        text, meeting = verdict.text, self.meeting
        if meeting.is_alone:
            text = f"{meeting.generation + 1} of {meeting.restarts}, from what is saved"
            text = text if verdict.next is Next.RESTART else ""
        elif text:
            self.logs.lost = text  # names the host
        if text:
            self._say(f"{verdict.next.label:<11}{text}")


_STOPPED = tuple(-signum for signum in STOP_SIGNALS)


class _RankLogs(LogsSpecs):
    """Where ranks write, and the environment that torch's agent does not set.

    Args:
        folder: for the output of ranks, and what they report.
        rendezvous: where the hosts meet.
        show: what of their output is shown.

    Attributes:
        outputs: what they write in this generation, by their number on this host.
        lost: who was lost in the generation before, and how; empty: none was.
        more: variables of all ranks.
        shown: whether the first rank writes to our own output.
    """

    def __init__(self, folder: Path, rendezvous: Rendezvous, show: Shown) -> None:
        super().__init__(str(folder))
        self._folder, self._show = folder, show
        self.outputs: dict[int, RankOutput] = {}
        self._meeting = rendezvous
        self.lost = ""
        self.more: dict[str, str] = {}
        self.shown = True

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def of(self, local_rank: int) -> Path:
        """Return the folder of a rank in this generation."""
        return self._folder / f"{self._meeting.generation}-{local_rank}"

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Complete the environment of every rank, and return the files for its output."""
        files = LogsDest()
        generation = str(self._meeting.generation)
        for local_rank, env in envs.items():
            folder = self.of(local_rank)
            folder.mkdir()
            env[PARENT_PID], env[JOB] = str(os.getpid()), self._meeting.job_id
            env[LOST] = self.lost
            env.update(self.more)
            report = folder / "report"
            report.touch()  # a rank may fail before anything else is done here
            env[REPORT] = str(report)
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            env["TORCHELASTIC_RESTART_COUNT"] = generation
            env.setdefault("OMP_NUM_THREADS", threads_of_a_rank(len(envs)))
            self._name_interfaces(env)
            # Rank 0 writes to the user, and so does what may become rank 0 over other hosts. The
            # output of the others is kept in case they crash.
            first = env["RANK"] == "0" or (STAYS in env and not local_rank)
            show = self._show
            if show.tee is None:
                direct = self.shown and first
            else:
                direct = env["WORLD_SIZE"] == "1" and show.folder is None
            if show.folder is not None:
                folder = show.folder / f"attempt_{generation}" / env["RANK"]
                folder.mkdir(parents=True)
            streams = [] if direct else show.streams(local_rank)
            self.outputs[local_rank] = RankOutput(int(env["RANK"]), folder, streams)
            files.stdouts[local_rank] = "" if direct else str(folder / "stdout.log")
            files.stderrs[local_rank] = "" if direct else str(folder / "stderr.log")
            files.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"]
        return files

    def _name_interfaces(self, env: dict[str, str]) -> None:
        # Otherwise backends look up the name of this host, which may not resolve, or may resolve to
        # an address that other hosts cannot reach.
        interface = interface_towards(self._meeting.nodes.address)
        if interface is None:
            return
        backends = ("GLOO",) if self._meeting.is_alone else ("GLOO", "NCCL")
        for backend in backends:
            name = f"{backend}_SOCKET_IFNAME"
            if name not in os.environ:
                env[name] = interface


class LocalRank:
    """One child process, with its file for stages and a :class:`RankReport`.

    Args:
        rank: its number among all ranks.
        pid: its process, which leads a process group.
        folder: for its files.
        output: what it writes.
    """

    def __init__(self, rank: int, pid: int, folder: Path, output: RankOutput) -> None:
        self.rank, self.output = rank, output
        self.report: RankReport | None = None
        self.stage: Stage | None = None
        self.has_stepped = False
        self.ended_at = 0.0
        self.code: int | None = None  # -9 for SIGKILL; None while the rank is running
        self._pid = pid
        self._folder = folder
        self._reports = NewLines(folder / "report")

    def poll(self) -> None:
        """Read what the rank has said since the last call, and whether it has ended."""
        self._look()
        self.output.show()
        for line in self._reports.new():
            stage = Stage.from_line(line)
            if stage is not None:
                self.stage = stage
                self.has_stepped |= stage is Stage.TRAINING
            elif self.report is None:
                self.report = plain.read(RankReport, line)

    def _look(self) -> None:
        """Look whether the process has ended, and leave the rest to torch, which started it."""
        if self.code is not None:
            return
        try:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # torch was first
            self.code = 0
            return
        if ended is not None:
            killed = ended.si_code != os.CLD_EXITED
            self.code = -ended.si_status if killed else ended.si_status
            self.ended_at = time.monotonic()

    @property
    def is_starting(self) -> bool:
        """Whether this rank runs, can be asked where it is, and has not completed a step."""
        return self.code is None and self.report is None and self.stage is Stage.STARTING

    def stacks(self) -> str:
        """Return all stacks that this rank has written; none: it could not yet."""
        file = self._folder / STACKS
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for its next world."""
        return self.code is None and self.stage is Stage.WAITING

    def move_on(self, rank: int, environment: Mapping[str, str]) -> None:
        """Give this rank, which waits, its number in the next world, and the variables of that."""
        self.rank, self.stage, self.has_stepped, self.report = rank, None, False, None
        beside = self._folder / f"{WORLD_FILE}.next"
        beside.write_text(json.dumps(environment), encoding="utf-8")
        beside.replace(self._folder / WORLD_FILE)

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
    def exit_code(self) -> int:
        """What the run ends with if this rank failed first."""
        if self.report is not None:
            return self.report.exit_code
        code = self.code or 1
        return 128 - code if code < 0 else code

    @property
    def failed_at(self) -> float:
        """When it failed, in seconds on the monotonic clock."""
        return self.ended_at if self.report is None else self.report.time

    def send(self, signum: int) -> None:
        """Send a signal, to the process group if it is SIGKILL."""
        if self.code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGKILL:
                os.killpg(self._pid, signum)
            else:
                os.kill(self._pid, signum)

    def wait(self, deadline: float) -> None:
        """Wait until the process has ended, but no longer than until ``deadline``.

        A process that hangs in its device does not even die of SIGKILL.
        """
        self._look()
        while self.code is None and time.monotonic() < deadline:
            time.sleep(POLL / 4)
            self._look()

    def close(self) -> None:
        """Close its files."""
        self._reports.close()
        self.output.close()


@contextlib.contextmanager
def agents_environment() -> Iterator[None]:
    """Set what torch's agents read from the environment, and keep its log from the user."""
    ours = {
        # All hosts run the same number of ranks, so ranks follow from the number of the host.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
        # Not those that we handle ourselves, nor SIGHUP, which nohup ignores.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }
    quit_handler = signal.getsignal(signal.SIGQUIT)
    log = logging.getLogger("torch.distributed.elastic")
    propagates, nothing = log.propagate, logging.NullHandler()
    try:
        if "LOGLEVEL" not in os.environ:
            log.propagate = False
            log.addHandler(nothing)
        with environment(**ours):
            yield
    finally:
        log.propagate = propagates
        log.removeHandler(nothing)
        signal.signal(signal.SIGQUIT, quit_handler)


def are_settled(ranks: list[LocalRank], failed: list[LocalRank], limit: float) -> bool:
    """Whether ranks may be ended, once some of them have failed.

    A rank that has reported an error may still run: what a program does as it ends, in threads and
    by ``atexit``, writes files, too.

    Args:
        ranks: all of them.
        failed: those that have failed.
        limit: seconds for the others to report what the first failure does to them.
    """
    running = [rank for rank in ranks if rank.code is None]
    if any(rank.report is not None for rank in running):
        limit = STOP_GRACE
    since = time.monotonic() - min(rank.failed_at for rank in failed)
    return not running or since > limit


def how_failed(rank: LocalRank) -> str:
    """Return in a few words how a rank failed, which the environment can hold."""
    if rank.report is not None:
        return f"failed: {printable(rank.report.text.strip().rpartition(chr(10))[2])}"
    code = rank.code or 1
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
