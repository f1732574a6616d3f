"""Run a function on several ranks, each a process of its own, and collect what they return.

    def each_rank(rank: int, world_size: int, scale: float) -> float:
        value = torch.tensor(scale * rank)
        torch.distributed.all_reduce(value)
        return value.item()

    assert run_ranks(each_rank, 2, 10.0) == [10.0, 10.0]

The processes come from a fork server that has imported torch (and what else the tests need) and
has never computed anything, so it has a single thread and a rank starts in milliseconds. Workers
of xdist get theirs from :mod:`tests.workers`. The
rendezvous store lives in the parent on a port that the kernel chose: there is no port to race for.

What takes longer is a rank's first step: DTensor works out each operation anew for each shape. So
ranks live on, with their process group, for the next test: see :func:`run_ranks`.

A rank that raises ends the run at once: the others are killed and the parent raises
:class:`RanksFailedError` with the rank's own traceback. A rank that hangs ends it after ``timeout``
seconds, with the stacks of every rank that was still running.
"""

from __future__ import annotations

import dataclasses
import enum
import faulthandler
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._devices import take_gpu
from tests import packing, workers

# After the first failure the others get this long to tell theirs: often all ranks fail alike, and
# sometimes the first to speak is only the echo of another's mistake.
_GRACE_SECONDS = 0.3


class RanksFailedError(AssertionError):
    """At least one rank raised, died or hung. The message holds each one's account."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        ok: whether the function returned.
        result: what it returned.
        error: the traceback, where it raised.
        exitcode: of the process: 0 after a return, 1 after an exception, ``-9`` when killed.
        output: what the rank wrote to stdout and stderr.
        seconds: from the start of the run until the rank returned, raised or died.
    """

    rank: int
    ok: bool
    result: Any = None
    error: str | None = None
    exitcode: int | None = None
    output: str = ""
    seconds: float = 0.0

    def describe(self, world_size: int) -> str:
        """Tell what went wrong on this rank, for people."""
        if self.error is not None:
            head, body = "raised", self.error.rstrip()
        elif self.exitcode is not None and self.exitcode < 0:
            head, body = f"was killed by {signal.Signals(-self.exitcode).name}", ""
        else:
            head, body = f"left with exit code {self.exitcode} without returning", ""
        text = f"rank {self.rank} of {world_size} {head}"
        if body:
            text += f":\n{body}"
        if self.output.strip():
            text += f"\n--- output of rank {self.rank} ---\n{self.output.rstrip()}"
        return text


class Processes(enum.Enum):
    """Which processes the ranks of a run are."""

    KEPT = "kept"
    NEW = "new"


class _Then(enum.Enum):
    """What a rank does after it has returned."""

    STAY = "stay"
    LEAVE = "leave"


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a rank needs to know before it can unpickle anything of the test's."""

    rank: int
    world_size: int
    backend: str | None
    port: int
    pg_timeout: float
    env: Mapping[str, str | None]
    warning_filters: Sequence[Any]
    directory: Path
    call: bytes


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 120,
    pg_timeout: float = 30,
    env: Mapping[str, str | None] | None = None,
    expect_failures: bool = False,
    processes: Processes = Processes.KEPT,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on every rank of a world.

    The world is that of the last run of the same size, if that run returned and both have the usual
    backend and timeout. Else it is new.

    Args:
        fn: a function of a module (not a lambda, not nested): ranks import it.
        world_size: the number of processes.
        args: pickled, given to every rank alike.
        backend: of the default process group; ``None`` makes none. Ranks see GPUs only if it names
            NCCL or CUDA. If there are fewer GPUs than ranks, several ranks share one.
        timeout: seconds for the whole run, from start to the last result.
        pg_timeout: seconds that a collective may take.
        env: environment variables of the ranks, beside torchrun's, which are set; a value of
            ``None`` unsets one. ``SHARDWISE_TRANSPORT`` is unset unless it is named here.
        expect_failures: return an :class:`Outcome` per rank instead of results, and let ranks that
            fail or die do so without ending the others. A hang is still an error.
        processes: :attr:`Processes.NEW` for what depends on the past of a process, such as its
            memory, or leaves something behind.
        kwargs: pickled, given to every rank alike.

    Returns:
        What ``fn`` returned, by rank; tensors travel by value. Or the outcomes.

    Raises:
        RanksFailedError: a rank raised, died or hung.
    """
    call = pickle.dumps((fn, args, kwargs))
    usual = (backend, pg_timeout, expect_failures, processes) == ("gloo", 30, False, Processes.KEPT)
    world = _take_world(world_size) if usual else _World(world_size)
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory, world:
        jobs = [
            _Job(
                rank=rank,
                world_size=world_size,
                backend=backend,
                port=world.store.port,
                pg_timeout=pg_timeout,
                env={"SHARDWISE_TRANSPORT": None, **(env or {})},
                warning_filters=list(warnings.filters),
                directory=Path(directory),
                call=call,
            )
            for rank in range(world_size)
        ]
        then = _Then.STAY if usual and len(world.ran) < _RUNS_OF_A_WORLD else _Then.LEAVE
        outcomes = world.run(jobs, then, timeout, stop_at_failure=not expect_failures)
    if not world.ends:
        _kept[world_size] = world
    for outcome in outcomes:
        if outcome.output:
            print(f"[rank {outcome.rank}] {outcome.output.rstrip()}")
    return outcomes if expect_failures else [outcome.result for outcome in outcomes]


#: After that many runs a world has many process groups.
_RUNS_OF_A_WORLD = 20
#: Worlds whose ranks wait for their next function, by size.
_kept: dict[int, _World] = {}


def end_kept_worlds() -> None:
    """End the worlds that wait: the next run has a new one."""
    for world in _kept.values():
        world.end()
    _kept.clear()


def _take_world(world_size: int) -> _World:
    """Take a world that waits, or a new one."""
    return _kept.pop(world_size, None) or _World(world_size)


class _World:
    """The processes of one run, as the parent sees them."""

    def __init__(self, world_size: int) -> None:
        self.store = _store(0, is_master=True)
        self.ran: list[str] = []
        self.ends = False
        self.jobs: Sequence[_Job] = []
        self.processes: list[ForkServerProcess] = []
        self.pipes: list[Connection] = []
        self.outcomes: dict[int, Outcome] = {}
        context = start_server()
        for _ in range(world_size):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_rank_main, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self.processes.append(process)
            self.pipes.append(parent_end)

    def __enter__(self) -> _World:
        return self

    def __exit__(self, exc_type: object, *exc_info: object) -> None:
        if exc_type is not None or self.then is _Then.LEAVE:
            self.ends = True
        if self.ends:
            self.end()

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join()
            process.close()
            pipe.close()

    def run(
        self, jobs: Sequence[_Job], then: _Then, timeout: float, *, stop_at_failure: bool
    ) -> list[Outcome]:
        """Give all ranks their jobs, and wait; return their outcomes or raise what went wrong."""
        self.jobs, self.then, self.outcomes = jobs, then, {}
        for job, pipe in zip(jobs, self.pipes, strict=True):
            with suppress(BrokenPipeError):  # it is dead, which is noted below
                pipe.send_bytes(pickle.dumps(job))
        self.started = time.monotonic()  # the server was waited for, which may have to import torch
        self.ran.append(os.environ.get("PYTEST_CURRENT_TEST", "a function").removesuffix(" (call)"))
        deadline = self.started + timeout
        failed = False
        while len(self.outcomes) < len(self.jobs):
            arrived = self._collect(deadline - time.monotonic())
            if not arrived:
                if failed:
                    break
                raise RanksFailedError(self._hang_report(timeout))
            if stop_at_failure and not failed and not all(outcome.ok for outcome in arrived):
                failed = True
                deadline = time.monotonic() + _GRACE_SECONDS
        if failed:
            raise RanksFailedError(self._failure_report())
        return self._dismiss(deadline)

    def _collect(self, seconds: float) -> list[Outcome]:
        """Wait for the next reports, at most ``seconds``; none means time is up."""
        waiting: dict[Any, int] = {}
        for job in self.jobs:
            if job.rank not in self.outcomes:
                waiting[self.pipes[job.rank]] = job.rank
                # A child of a rank that died may hold its pipe open.
                waiting[self.processes[job.rank].sentinel] = job.rank
        arrived = []
        ready = wait(list(waiting), timeout=max(seconds, 0))
        for rank in sorted({waiting[each] for each in ready}):
            self.outcomes[rank] = self._receive(rank, self.pipes[rank])
            arrived.append(self.outcomes[rank])
        return arrived

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        seconds = time.monotonic() - self.started
        try:
            if not pipe.poll():
                raise EOFError
            result, error = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):  # it died before it could report
            self.processes[rank].join()
            exitcode = self.processes[rank].exitcode
            error, result, ok = None, None, False
        else:
            ok = error is None
            exitcode = 0 if ok else 1
        return Outcome(rank, ok, result, error, exitcode, _output(self.jobs[rank]), seconds)

    def _dismiss(self, deadline: float) -> list[Outcome]:
        """Let the ranks that returned leave, now that no peer needs them any more."""
        returned = [outcome.rank for outcome in self.outcomes.values() if outcome.ok]
        for rank in returned:
            self.pipes[rank].send_bytes(pickle.dumps(self.then))
        for rank in returned:
            self._dismiss_rank(rank, max(deadline - time.monotonic(), 5))
        return [
            dataclasses.replace(self.outcomes[job.rank], output=_output(job)) for job in self.jobs
        ]

    def _dismiss_rank(self, rank: int, seconds: float) -> None:
        process, doing = self.processes[rank], "destroying its process groups"
        if self.then is _Then.STAY:
            doing = "waiting for the next function"
            with suppress(EOFError, ConnectionResetError):
                if self.pipes[rank].poll(seconds):
                    if self.pipes[rank].recv_bytes() == b"leaving":
                        self.ends = True
                    return
        process.join(seconds)
        if process.exitcode != 0 or self.then is _Then.STAY:
            state = "did not end" if process.exitcode is None else "ended badly"
            raise RanksFailedError(
                f"rank {rank} of {len(self.jobs)} returned, but {state} while {doing} "
                f"(exit code {process.exitcode})\n{_output(self.jobs[rank])}"
            )

    def _failure_report(self) -> str:
        failures = [outcome for outcome in self.outcomes.values() if not outcome.ok]
        parts = [outcome.describe(len(self.jobs)) for outcome in failures]
        if earlier := self.ran[:-1]:
            parts.append("The same ranks ran before: " + ", ".join(earlier))
        return "\n\n".join(parts)

    def _hang_report(self, timeout: float) -> str:
        hung = [job for job in self.jobs if job.rank not in self.outcomes]
        for job in hung:
            pid = self.processes[job.rank].pid
            if pid is not None and _stacks_file(job).exists():
                os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.3)
        parts = [f"ranks {[job.rank for job in hung]} did not return within {timeout:g} s"]
        if self.outcomes:
            parts.append(f"ranks {sorted(self.outcomes)} did")
        for job in hung:
            stacks = _read(_stacks_file(job)) or "(no stack: it had not started)"
            parts.append(f"rank {job.rank} of {len(self.jobs)} was at:\n{stacks}")
            if output := _output(job).strip():
                parts.append(f"--- output of rank {job.rank} ---\n{output}")
        if not all(outcome.ok for outcome in self.outcomes.values()):
            parts.append(self._failure_report())
        return "\n".join(parts)


def _store(port: int, *, is_master: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=is_master, wait_for_workers=False
    )


def remember() -> None:
    """Note in the server what ranks have to put back between two functions."""
    _patchable()


def start_server() -> multiprocessing.context.ForkServerContext:
    """Return the context whose server has imported torch; start the server if there is none.

    A process has one server, that of whoever is first: so tests of others who fork start this one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    variables = workers.ranks_env()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _rank_main(pipe: Connection) -> None:
    """Be one rank: set up, call, report, and stay until the parent lets go."""
    inbox = _watch_parent(pipe)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so shells start what runs beside them
        signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {int(n): signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = _Surroundings(dict(os.environ), Path.cwd(), handlers)
    then = _Then.STAY
    while then is _Then.STAY:
        job = inbox.get()
        _redirect_output(job)
        with _stacks_file(job).open("w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            faulthandler.enable(file=sys.stderr)
            try:
                result, error = _call(job), None
                report = packing.dumps((result, error))
            except Exception:
                error = traceback.format_exc()
                _flush()  # first: who receives the error reads the output next
                pipe.send_bytes(pickle.dumps((None, error)))
                os._exit(1)  # no orderly end: a peer may be waiting for us in a collective
            _flush()
            pipe.send_bytes(report)
            del result, report
            then = inbox.get()
            if then is _Then.STAY and not dist.is_initialized():  # the function has ended its group
                then = _Then.LEAVE
                pipe.send_bytes(b"leaving")
            elif then is _Then.STAY:
                _put_back(before)
                pipe.send_bytes(b"ready")
            faulthandler.unregister(signal.SIGUSR1)
    if dist.is_initialized():
        dist.destroy_process_group()
    _flush()


@functools.cache
def _patchable() -> dict[Any, dict[str, Any]]:
    """What tests replace on ranks and do not put back: functions, methods and constants."""
    modules = [
        module
        for path, module in sys.modules.items()
        if path.startswith("shardwise.") or path in ("torch.distributed", "os", "shutil", "fcntl")
    ]
    of_modules = {
        module: {
            name: value
            for name, value in vars(module).items()
            if name.lstrip("_").isupper() or type(value) in _FUNCTIONS
        }
        for module in modules
    }
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if issubclass(type(value), type) and value.__module__.startswith("shardwise.")
    }
    of_classes = {
        each: {name: value for name, value in vars(each).items() if type(value) in _FUNCTIONS}
        for each in classes
    }
    return {**of_modules, **of_classes}


@dataclasses.dataclass(frozen=True)
class _Surroundings:
    """What a rank's process has before its first function."""

    environment: Mapping[str, str]
    folder: Path
    handlers: Mapping[int, Any]


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, property, classmethod, staticmethod)


def _put_back(before: _Surroundings) -> None:
    """Undo what the last function may have changed in this process."""
    os.environ.clear()
    os.environ.update(before.environment)
    os.chdir(before.folder)
    for number, handler in before.handlers.items():
        signal.signal(number, handler)
    for owner, values in _patchable().items():
        if values.items() <= vars(owner).items():  # as of nearly all; one by one takes longer
            continue
        for name, value in values.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def _call(job: _Job) -> Any:
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there: no rank has to open it
    )
    if sys.platform == "linux":  # do not depend on how this host's name resolves
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    uses_gpu = job.backend is not None and ("nccl" in job.backend or "cuda" in job.backend)
    if not uses_gpu:  # ranks on the CPU, also where there is a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _set_environment(job.env)
    warnings.filters[:] = job.warning_filters  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job.backend is not None and not dist.is_initialized():
        if uses_gpu:
            take_gpu(job.rank, job.world_size)
        store = _store(job.port, is_master=False)
        # The timeout of a group, which may be short, is not for ranks that start late.
        if store.add("started", 1) == job.world_size:
            store.set("all started", "")
        store.wait(["all started"])
        dist.init_process_group(
            job.backend,
            store=store,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.pg_timeout),
        )
    fn, args, kwargs = pickle.loads(job.call)
    return fn(job.rank, job.world_size, *args, **kwargs)


def _watch_parent(pipe: Connection) -> queue.SimpleQueue[Any]:
    """Return what the parent sends; die if the parent does."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def watch() -> None:
        try:
            while True:
                inbox.put(pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()
    return inbox


def _redirect_output(job: _Job) -> None:
    with (job.directory / f"output-{job.rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _output(job: _Job) -> str:
    return _read(job.directory / f"output-{job.rank}")


def _stacks_file(job: _Job) -> Path:
    return job.directory / f"stacks-{job.rank}"


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
