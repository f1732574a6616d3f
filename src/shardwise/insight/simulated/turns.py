"""Ranks that are threads and take turns.

Exactly one rank runs. It keeps the turn until it has to wait for another, or ends. So there are no
races, and nothing depends on timing: a program does the same every time, and a breakpoint stops all
ranks. Where every rank waits for another, all of them fail at once.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.insight.simulated.schedules import InOrder, Schedule


@dataclass
class RankOutcome:
    """What a function came to on one rank.

    Attributes:
        value: what it returned.
        error: what it raised, if it did.
        doing: what it was about to do when the first rank failed: ``""`` for that rank, and if none
            has.
    """

    value: Any = None
    error: BaseException | None = None
    doing: str = ""


def _closed() -> threading.Lock:
    """Make a gate that a release opens for one thread. A semaphore takes several times as long."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class Process(Protocol):
    """What a process has one of, and a rank needs one of its own."""

    def save(self) -> Any:
        """Return it, before another rank has the turn."""

    def restore(self, saved: Any) -> None:
        """Put it back."""


class RankTurns:
    """The threads of a world.

    Args:
        world_size: number of ranks.
        process: of which each rank has its own.

    Attributes:
        has_ended: whether they run no more functions.
    """

    def __init__(self, world_size: int, process: Process) -> None:
        self.world_size = world_size
        self.schedule: Schedule = InOrder()
        self._process = process
        self._saved: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._gates = [_closed() for _ in range(world_size)]
        self._is_over = _closed()
        self._function: Callable[[int], Any] | None = None
        self._outcomes: list[RankOutcome] = []
        self._ready: set[int] = set()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._stuck: dict[int, BaseException] = {}
        self.has_ended = False
        self._running = 0
        self._here = threading.local()

    @property
    def rank(self) -> int:
        """The rank of the calling thread.

        Raises:
            RuntimeError: it is no rank of this world.
        """
        found: int | None = getattr(self._here, "rank", None)
        if found is None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} is no rank of this simulated world of "
                f"{self.world_size}: call what communicates in a function given to simulate(), or "
                "to run() of a simulation, and not in another thread"
            )
        return found

    def is_rank(self) -> bool:
        """Whether the calling thread is a rank of this world."""
        return hasattr(self._here, "rank")

    def run(self, function: Callable[[int], Any]) -> list[RankOutcome]:
        """Call ``function(rank)`` for every rank, and return what came of it, by rank.

        Raises:
            RuntimeError: the threads have ended.
        """
        if self.has_ended:
            raise RuntimeError(
                f"these {self.world_size} simulated ranks have ended, with the block of their "
                "simulation or because one of them failed: begin another simulation"
            )
        before = self._process.save()
        self._saved = self._saved or [copy.deepcopy(before) for _ in range(self.world_size)]
        if not self._threads:
            self._start()
        self._function = function
        self._outcomes = [RankOutcome() for _ in range(self.world_size)]
        self._ready = set(range(self.world_size))
        try:
            self._wait_for_all(self._next(self.world_size - 1))
        finally:
            self._function = None
            self._process.restore(before)
        return self._outcomes

    def renew(self) -> None:
        """Let ranks begin their next function as new processes would, with what is here then."""
        self._saved = []

    def end(self) -> None:
        """End the threads, unless they are in a function."""
        if self._function is not None:
            return
        self.renew()
        self.has_ended = True
        threads, self._threads = self._threads, []
        for gate in self._gates[: len(threads)]:
            gate.release()
        for thread in threads:
            if thread is not threading.current_thread():  # which lets go of its own world
                thread.join(1)  # one that a second Ctrl-C has left may be in a long call

    def wait_for(self, is_over: Callable[[], bool], doing: str) -> None:
        """Let other ranks run until ``is_over()``.

        Args:
            is_over: called whenever the turn may pass.
            doing: what the rank waits in, for messages.

        Raises:
            RanksDivergedError: all ranks wait, each for something that none of them will do.
            PeerLostError: a rank has ended without doing it.
        """
        rank = self.rank
        if is_over() and not self.schedule.is_everywhere:
            return
        self._waiting[rank] = (is_over, doing)
        try:
            self._pass_on(rank)
        finally:
            del self._waiting[rank]

    def pause(self) -> None:
        """Let other ranks go first, if the schedule says so."""
        if self.schedule.is_everywhere and self.is_rank():
            self.yield_turn()

    def yield_turn(self) -> None:
        """Let other ranks go first."""
        self._ready.add(self.rank)
        self._pass_on(self.rank)

    def _start(self) -> None:
        count = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._be, args=(rank, count), daemon=True, name=f"rank-{rank}")
            for rank in range(self.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def _be(self, rank: int, num_threads: int) -> None:
        """Be a rank, until the world ends."""
        self._here.rank = rank
        torch.set_num_threads(num_threads)  # a setting of each thread
        torch.autograd.set_multithreading_enabled(False)  # else hooks run in threads of autograd
        while True:
            self._gates[rank].acquire()
            if self._function is None:
                return
            outcome = self._outcomes[rank]
            try:
                self._begin_turn(rank, self._saved[rank])
                outcome.value = self._function(rank)
            except BaseException as error:
                self._note_failure(rank, error)
            self._saved[rank] = self._process.save()
            after = self._next(rank)
            del outcome
            (self._is_over if after < 0 else self._gates[after]).release()

    def _note_failure(self, rank: int, error: BaseException) -> None:
        """Keep an error, and what the others are doing at the time of the first one."""
        if all(each.error is None for each in self._outcomes):
            for other, each in enumerate(self._outcomes):
                if other in self._waiting:
                    each.doing = f"waits in {self._waiting[other][1]}"
                elif other in self._ready:
                    each.doing = "can go on"
                elif other != rank:
                    each.doing = "has ended"
        self._outcomes[rank].error = error

    def _pass_on(self, rank: int) -> None:
        """Let the next rank run, and return when the turn is this rank's again."""
        after, saved = self._next(rank), None
        if after != rank:
            saved = self._process.save()
            self._gates[after].release()
            self._gates[rank].acquire()
        self._begin_turn(rank, saved)

    def _begin_turn(self, rank: int, saved: Any) -> None:
        """Go on with what a rank has of its own, or with the error that is prepared for it."""
        self._running = rank
        self._ready.discard(rank)
        if saved is not None:
            self._process.restore(saved)
        stuck = self._stuck.pop(rank, None)
        if stuck is not None:
            raise stuck

    def _next(self, rank: int) -> int:
        """Return whose turn is next behind ``rank``; -1 if all have ended."""
        behind = [(rank + step) % self.world_size for step in range(1, self.world_size + 1)]
        able = [each for each in behind if self._can_go_on(each)]
        if not able and self._waiting:
            self._note_stuck()
            able = [each for each in behind if each in self._stuck]
        if len(able) < 2:
            return able[0] if able else -1
        return able[self.schedule.choose(len(able))]

    def _can_go_on(self, rank: int) -> bool:
        if rank in self._ready or rank in self._stuck:
            return True
        return rank in self._waiting and self._waiting[rank][0]()

    def _note_stuck(self) -> None:
        """Prepare the errors of all ranks: each waits for what none of them will do."""
        does = {rank: f"rank {rank} waits in {doing}" for rank, (_, doing) in self._waiting.items()}
        for rank in set(range(self.world_size)) - set(self._waiting):
            error = self._outcomes[rank].error
            does[rank] = f"rank {rank} has {'ended' if error is None else f'raised {error!r}'}"
        kind = RanksDivergedError if len(self._waiting) == self.world_size else PeerLostError
        for rank, (_, doing) in self._waiting.items():
            others = "; ".join(does[each] for each in sorted(does) if each != rank)
            self._stuck[rank] = kind(f"rank {rank} waits forever in {doing}: {others}")

    def _wait_for_all(self, first: int) -> None:
        try:
            self._gates[first].release()
            while not self._is_over.acquire(timeout=0.1):
                pass  # a signal that another thread got wakes nobody
        except BaseException:  # Ctrl-C: the ranks get it, too, and a second one leaves them
            idle = {*self._waiting, *self._ready}
            self._stuck |= {rank: KeyboardInterrupt() for rank in idle}
            if self._running not in idle:
                ident = ctypes.c_ulong(self._threads[self._running].ident or 0)
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                self._is_over.acquire()
            raise
