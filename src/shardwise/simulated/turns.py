"""Ranks that are threads and take turns.

Exactly one rank runs. It keeps the turn until it has to wait for another, or ends. So there are no
races, and nothing depends on timing: a program does the same every time, and a breakpoint stops all
ranks. Where every rank waits for another, all of them fail at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardwise.base import libc
from shardwise.base.errors import PeerLostError, RanksDivergedError
from shardwise.schedules import Schedule
from shardwise.simulated.own import Own

#: Whether a rank that waits can go on, and what it waits in; ``""``: it only lets others go first.
_Wait = tuple[Callable[[], bool], str]
_READY: _Wait = (lambda: True, "")


def _closed() -> threading.Lock:
    """Make a gate that a release opens for one thread. A semaphore takes several times as long."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class RankTurns:
    """The threads of a world.

    Args:
        world_size: number of ranks.

    Attributes:
        schedule: decides whose turn is next.
        has_ended: whether they run no more functions.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.schedule = Schedule()
        self.has_ended = False
        self._own = Own()
        self._saved: list[Any] = []
        self._threads: list[threading.Thread] = []
        self._gates = [_closed() for _ in range(world_size)]
        self._cores: dict[int, set[int]] = {}
        self._process = os.getpid()
        self._is_over = threading.Event()
        self._calling = threading.Lock()  # held while a call begins or ends, or is interrupted
        self._has_begun = False
        self._called: int | None = None  # the rank that is in the function, and may be interrupted
        self._function: Callable[[int], Any] | None = None
        self._values: list[Any] = []
        self._errors: dict[int, BaseException] = {}  # in the order in which ranks failed
        self._waits: dict[int, _Wait] = {}  # of all ranks that neither run nor have ended
        self._stuck: dict[int, BaseException] = {}
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
                "to run() of a simulation, and not in another thread or another simulation"
            )
        return found

    def is_rank(self) -> bool:
        """Whether the calling thread is a rank of this world."""
        return hasattr(self._here, "rank")

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call ``function(rank)`` for every rank, and return what it returned, by rank.

        Raises:
            Exception: what a rank raised first, with a traceback that begins in the user's lines.
            RuntimeError: the threads have ended, or are those of another process.
        """
        if self._process != os.getpid():
            raise RuntimeError(
                f"these {self.world_size} simulated ranks are threads of process {self._process}, "
                f"which process {os.getpid()} was forked from: begin another simulation here"
            )
        if self.has_ended:
            raise RuntimeError(
                f"these {self.world_size} simulated ranks have ended, with the block of their "
                "simulation or because one of them failed: begin another simulation"
            )
        before = self._own.save()
        self._saved = self._saved or [before] * self.world_size
        if not self._threads:
            count = torch.get_num_threads()
            self._threads = [
                threading.Thread(target=self._be, args=(r, count), daemon=True, name=f"rank-{r}")
                for r in range(self.world_size)
            ]
            for thread in self._threads:
                thread.start()
        try:
            try:
                self._values = [None] * self.world_size
                self._waits = dict.fromkeys(range(self.world_size), _READY)
                self._has_begun = False
                self._is_over.clear()
                self._function = function
                self._wait_for_all(self._next(self.world_size - 1))
                values, errors = self._values, self._errors
            finally:
                self._put_back(before)
        finally:
            self._put_back(before)  # Ctrl-C may have ended the first attempt
        for error in errors.values():
            raise error.with_traceback(_of_user(error.__traceback__))
        return values

    def _put_back(self, before: list[Any]) -> None:
        self._function = None
        self._values, self._errors = [], {}
        self._own.save()  # what a rank that was left in its function has changed, too
        self._own.restore(before)

    def end(self) -> None:
        """End the threads, unless they are in a function. It may be called again."""
        if self._function is not None:
            return
        self.has_ended = True
        self._saved = []
        # One by one: threads that end together may wait for each other forever, as what torch keeps
        # of DTensors for each of them goes.
        for gate, thread in zip(self._gates, self._threads, strict=False):
            with contextlib.suppress(RuntimeError):  # open already: Ctrl-C came as the rank began
                gate.release()
            # One that was not started cannot be joined; a rank lets go of its own world.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1)  # one that a second Ctrl-C has left may be in a long call
        self._threads = []

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
        if self.schedule.is_everywhere or not is_over():
            self._pass_on(rank, (is_over, doing))

    def pause(self) -> None:
        """Let other ranks go first, if the schedule says so."""
        if self.schedule.is_everywhere and self.is_rank():
            self.yield_turn()

    def yield_turn(self) -> None:
        """Let other ranks go first."""
        self._pass_on(self.rank, _READY)

    def _be(self, rank: int, num_threads: int) -> None:
        self._here.rank = rank
        torch.set_num_threads(num_threads)  # a setting of each thread
        torch.autograd.set_multithreading_enabled(False)  # else hooks run in threads of autograd
        while self._is_called(rank):
            try:
                try:
                    self._go_on(rank, self._saved[rank])
                    assert self._function is not None
                    self._values[rank] = self._function(rank)
                finally:
                    self._leave()
            except BaseException as error:
                self._leave()  # an interrupt may have ended the first attempt
                self._note_failure(rank, error)
            self._waits.pop(rank, None)  # an interrupt may come before it waits
            self._saved[rank] = self._own.save()
            after = self._next(rank)
            if after < 0:
                self._is_over.set()
            else:
                self._wake(after)

    def _is_called(self, rank: int) -> bool:
        self._sleep(rank)
        with self._calling:
            self._has_begun = True
            return self._function is not None

    def _leave(self) -> None:
        with self._calling:
            self._called = None

    def _note_failure(self, rank: int, error: BaseException) -> None:
        """Keep an error; the first one says what the others are about to do."""
        if not self._errors:
            note = f"On rank {rank} of {self.world_size}. {self._others(rank)}"
            error.add_note(note.strip())
            if self.schedule.is_everywhere:
                error.add_note(f"This order of turns repeats it: schedule={self.schedule!r}")
        self._errors[rank] = error

    def _pass_on(self, rank: int, wait: _Wait) -> None:
        """Let the next rank run, and return when the turn is this rank's again."""
        with self._calling:
            self._called = None  # from here on, an interrupt comes with the next turn
            self._waits[rank] = wait
        after, saved = self._next(rank), None
        if after != rank:
            saved = self._own.save()
            self._wake(after)
            self._sleep(rank)
        self._go_on(rank, saved)

    def _go_on(self, rank: int, saved: Any) -> None:
        """Go on with what a rank has of its own, or with the error that is prepared for it."""
        with self._calling:
            self._called = rank
            del self._waits[rank]
        if saved is not None:
            self._own.restore(saved)
        if rank in self._stuck:
            raise self._stuck.pop(rank)

    def _wake(self, rank: int) -> None:
        """Open the gate of a rank, whose thread begins on this core: elsewhere it begins later."""
        thread, here = self._threads[rank].native_id or 0, libc.core()
        with contextlib.suppress(OSError):
            cores = os.sched_getaffinity(thread) if here >= 0 else set()
            if here in cores and len(cores) > 1:
                os.sched_setaffinity(thread, {here})
                self._cores[rank] = cores
        self._gates[rank].release()

    def _sleep(self, rank: int) -> None:
        """Wait at the gate of a rank. Behind it, its thread may run where it could before."""
        try:
            self._gates[rank].acquire()
        finally:
            cores = self._cores.pop(rank, None)
            if cores is not None:
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(0, cores)

    def _next(self, rank: int) -> int:
        """Return whose turn is next behind ``rank``; -1 if all have ended."""
        behind = [*range(rank + 1, self.world_size), *range(rank + 1)]
        waiting = [each for each in behind if each in self._waits]
        able = [each for each in waiting if each in self._stuck or self._waits[each][0]()]
        if not able and waiting:
            self._note_stuck()
            able = waiting
        choice = self.schedule.choose(len(able)) if len(able) > 1 else 0
        return able[choice] if able else -1

    def _note_stuck(self) -> None:
        """Prepare the errors of all ranks: each waits for what none of them will do."""
        kind = RanksDivergedError if len(self._waits) == self.world_size else PeerLostError
        for rank, (_, doing) in self._waits.items():
            self._stuck[rank] = kind(f"rank {rank} waits forever in {doing}: {self._others(rank)}")

    def _others(self, rank: int) -> str:

        def does(other: int) -> str:
            if other in self._waits:
                doing = self._waits[other][1]
                return f"waits in {doing}" if doing else "can go on"
            error = self._errors.get(other)
            return "has ended" if error is None else f"has raised {error!r}"

        others = [other for other in range(self.world_size) if other != rank]
        return "; ".join(f"rank {other} {does(other)}" for other in others)

    def _wait_for_all(self, first: int) -> None:
        try:
            self._wake(first)
            while not self._is_over.wait(0.1):
                pass  # a signal that another thread got wakes nobody
        except BaseException:  # Ctrl-C: the ranks get it, too, and a second one leaves them
            if self._interrupt():
                with contextlib.suppress(KeyboardInterrupt):
                    self._is_over.wait()
            raise

    def _interrupt(self) -> bool:
        with self._calling:
            if not self._has_begun:  # and none will
                self._function = None
                return False
            self._stuck |= {rank: KeyboardInterrupt() for rank in self._waits}
            if self._called is not None:
                ident = ctypes.c_ulong(self._threads[self._called].ident or 0)
                interrupt = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, interrupt)
            return True


def _of_user(found: TracebackType | None) -> TracebackType | None:
    """Skip the lines that are ours, before those of the function."""
    at, ours = found, Path(__file__).parent
    while at is not None and Path(at.tb_frame.f_code.co_filename).parent == ours:
        at = at.tb_next
    return at or found
