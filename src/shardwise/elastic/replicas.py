"""The launcher of replicas that are worlds of their own: each is started again by itself.

A world ends when one of its ranks does. Then its other ranks are killed, and it is started again
while the other worlds go on. Once a world has ended well, the training is complete: those that are
not there at the end are not started again. Each world has an agent of its own, in a thread.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup

from shardwise.base.say import say
from shardwise.elastic.agent import POLL, Agent, LocalRank, Signals, agents_environment, how_failed
from shardwise.elastic.clock import process_clock
from shardwise.elastic.fork_server import running
from shardwise.elastic.hosts import HERE, Command
from shardwise.elastic.membership import Next, Verdict
from shardwise.elastic.outcome import STOP_GRACE, Outcome, Result, exit_codes
from shardwise.elastic.rank import Ending
from shardwise.elastic.rendezvous import Rendezvous
from shardwise.elastic.world import JOB, ReplicaWorld, threads_of_a_rank

_LEAST_GRACE = 60.0  # seconds for the others to end, once one has


class _Replica(Agent):
    """Runs a replica from its first start to its last, and does not say what others have said."""

    def __init__(self, launcher: ReplicaLauncher, replica: ReplicaWorld, signals: Signals) -> None:
        ranks, restarts = launcher.ranks, launcher.restarts
        meeting = Rendezvous(HERE, ranks, restarts, stopped=lambda: bool(signals.noted))
        super().__init__(launcher.command, meeting, signals)
        self._launcher, self._replica = launcher, replica
        self._failure: LocalRank | None = None  # of the last start
        self._is_given_up = False
        threads = threads_of_a_rank(ranks * replica.count)
        self.logs.more = {JOB: launcher.job, "OMP_NUM_THREADS": threads}
        self.logs.shown = replica.number == 0

    def run_job(self) -> int:
        """Run its ranks to their end; what the agent itself raises ends no other replica."""
        try:
            return super().run_job()
        except Exception as error:
            if not self._is_given_up:
                reason = " ".join(str(error).split()) or type(error).__name__
                self._launcher.lost(self._replica, f"was lost: its agent found {reason}")
            return getattr(error, "exit_code", 1)

    def give_up(self) -> None:
        """Kill its ranks, without a word. Call it until it has ended: it may be starting."""
        self._is_given_up = True
        for rank in self.ranks:
            rank.send(signal.SIGKILL)

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._replica = replace(self._replica, restarts=self.meeting.generation)
        self.logs.more |= self._replica.environment()
        self._launcher.in_round.discard(self._replica.number)
        pids = super().start_workers(worker_group)
        self._launcher.started(self._replica, [*pids.values()])
        return pids

    def _say(self, text: str) -> None:
        self._launcher.say_once(text, text)

    def _finish(self) -> Outcome:
        outcome = super()._finish()
        if not outcome.exit_code:
            self._launcher.finished.add(self._replica.number)
        return outcome

    def _fail(self, failed: list[LocalRank]) -> Outcome:
        outcome = super()._fail(failed)
        is_last = self._is_given_up or self._launcher.finished
        return replace(outcome, result=Result.FAILED) if is_last else outcome

    def _tell_failed(self, rank: LocalRank) -> None:
        if not self._is_given_up:
            self._failure, why = rank, how_failed(rank)
            self.logs.lost = f"replica {self._replica.number} {why}"
            self._launcher.lost(self._replica, why)

    def _show_verdict(self, outcome: Outcome, verdict: Verdict) -> None:
        failure = self._failure
        if outcome.farewell:
            self._launcher.say_once("farewell", outcome.farewell)
        is_over = self._is_given_up or self.signals.noted or self._launcher.finished
        if verdict.next is not Next.FAIL or failure is None or is_over:
            return
        number, limit = self._replica.number, f" (--max-restarts {self.meeting.restarts})"
        if failure.report is not None:
            say(f"replica {number}: {failure.report.text}")
            limit = "" if failure.report.ending is Ending.USER else limit
        elif tail := failure.output.tail():
            say(tail)
        say(f"replicas   replica {number} is not started again{limit}")


class ReplicaLauncher:
    """Runs one command as the ranks of several replicas, each a world of its own.

    Args:
        command: gives the program and arguments of a start, the same for every rank.
        replica: the first one, not yet restarted.
        ranks: of each replica.
        restarts: how often each replica may be started again.
        started: called with the replica and its processes, in any thread.
        lost: called with the replica and the reason, in any thread.

    Attributes:
        job: tells the job from every other one.
        finished: the replicas that have completed the training.
        in_round: those that were in the last round since they started.
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
        self.command, self.ranks, self.restarts = command, ranks, restarts
        self.started, self.lost = started, lost
        self.job = uuid.uuid4().hex
        self.finished: set[int] = set()
        self.in_round: set[int] = set()
        self._first = replica
        self._round_at = 0.0
        self._signals: Signals | None = None
        self._saying = threading.Lock()
        self._said: set[str] = set()

    @property
    def is_stopping(self) -> bool:
        """Whether a signal has asked all replicas to stop."""
        return self._signals is not None and bool(self._signals.noted)

    def made_round(self, members: Sequence[int]) -> None:
        """Note who was in the last round. Other threads may call it."""
        self.in_round, self._round_at = set(members), process_clock().now()

    def say_once(self, what: str, text: str) -> None:
        """Say something that several replicas would say. Other threads may call it."""
        with self._saying:
            if what not in self._said:
                self._said.add(what)
                say(text)

    def run(self) -> int:
        """Run all replicas to their end.

        Returns:
            The exit code: 0 if any has completed the training.
        """
        numbers = range(self._first.count)
        with contextlib.ExitStack() as held:
            signals = self._signals = held.enter_context(contextlib.closing(Signals()))
            held.enter_context(exit_codes())
            held.enter_context(running(self.command, len(numbers) * self.ranks))
            held.enter_context(agents_environment())
            pool = held.enter_context(ThreadPoolExecutor(len(numbers)))
            agents = [_Replica(self, replace(self._first, number=n), signals) for n in numbers]
            runs = [pool.submit(agent.run_job) for agent in agents]
            try:
                self._watch(agents, runs, signals)
            finally:
                while not all(run.done() for run in runs):
                    for agent in agents:
                        agent.give_up()
                    time.sleep(POLL)
        if signals.noted:
            return 128 + signals.noted[0]
        return 0 if self.finished else next(filter(None, (run.result() for run in runs)), 1)

    def _watch(self, agents: list[_Replica], runs: list[Future[int]], signals: Signals) -> None:
        """Wait until all replicas have ended, and end those that hold up the others."""
        stop_by = grace = math.inf
        while len(ended := [run.result() for run in runs if run.done()]) < len(runs):
            time.sleep(POLL)
            now = process_clock().now()
            if signals.noted and ended:
                stop_by = min(stop_by, now + STOP_GRACE)
            if now > stop_by:
                say("Stopped without waiting for all replicas.")
                return
            if self.finished:
                grace = min(grace, now + _LEAST_GRACE + 2 * (now - self._round_at))
            for number, (agent, run) in enumerate(zip(agents, runs, strict=True)):
                is_late = number not in self.in_round or now > grace
                if self.finished and is_late and number not in self.finished and not run.done():
                    text = f"replicas   replica {number} was not there at the end, and is ended"
                    self.say_once(text, text)
                    agent.give_up()
