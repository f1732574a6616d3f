"""The life of one rank: tied to its launcher, connected to its peers, reporting how it ends.

SIGINT and SIGTERM end a rank at once, or after the current step. Before and after training there is
nothing to save: a signal raises :class:`Stopped` wherever the rank is. Inside ``with
signals.deferred():`` it is only noted, and the training loop checks for it between steps.

A rank reports over a pipe of its own: one line for every :class:`Stage`, then one JSON object, the
:class:`Report`. The time in it is from the machine's monotonic clock, which all processes of a host
share, so the launcher can tell which rank failed first.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from types import FrameType
from typing import NoReturn

from shardwise.errors import lost_peer_behind
from shardwise.launch.errors import Stopped, UserError, signal_name
from shardwise.launch.world import PARENT_PID, REPORT_FD, STORE_FD, World, launched_here

# The disk is full or read-only: a traceback would not help.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_rank(world: World, body: Callable[[World, StopSignals], None]) -> NoReturn:
    """Run ``body`` as one rank and end the process with its exit code.

    The exit code is 0 when ``body`` returns, 2 for a :class:`UserError` (unless it has another
    one), 128 + signal for :class:`Stopped`, and 1 for every other error. Any error raised from the
    loss of a peer counts as that loss: the same command may succeed later.
    """
    signals = StopSignals(_report_stage)
    try:
        signals.install()
        faulthandler.enable()
        _die_with_parent()
        body(world, signals)
    except BaseException as error:  # the launcher must learn of it, whatever it is
        _report(_ending(world, error), world)
        code = _exit_code(error)
    else:
        code = 0
    _leave(code)


@contextlib.contextmanager
def connected(world: World, backend: str, timeout: float | None = None) -> Iterator[None]:
    """Join the default process group of ``torch.distributed`` for the duration of the context.

    Under our launcher, rank 0 serves the store on a socket that the launcher has already bound, so
    no other program can take its port; otherwise MASTER_ADDR and MASTER_PORT locate the store.

    Args:
        world: this rank.
        backend: for ``init_process_group``, e.g. ``gloo``.
        timeout: seconds that a collective may take; None for torch's default.

    Raises:
        PeerLostError: another rank died, or never started.
    """
    import torch.distributed as dist

    from shardwise.transport.peers import Peers, connecting

    with connecting(world.rank, world.size):
        _connect(world, backend, None if timeout is None else timedelta(seconds=timeout))
    yield
    # Only after success: if a peer is gone, shutting down may wait for it. The barrier keeps the
    # store of rank 0 alive until no rank needs it.
    with Peers().collective("the barrier at the end"):
        dist.barrier()
    dist.destroy_process_group()


def _connect(world: World, backend: str, timeout: timedelta | None) -> None:
    """Create the default process group."""
    import torch.distributed as dist

    if not launched_here():
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)
        return
    fd = os.environ.get(STORE_FD)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world.size,
        is_master=world.rank == 0,
        master_listen_fd=None if fd is None else int(fd),
    )
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )


def _die_with_parent() -> None:
    """Let the kernel kill this process when its launcher dies, for whatever reason."""
    parent = os.environ.get(PARENT_PID)
    if parent is None or not sys.platform.startswith("linux"):
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the call above
        os._exit(1)


def _ending(world: World, error: BaseException) -> Report:
    code = _exit_code(error)
    if isinstance(error, Stopped):
        return Report(world.rank, Ending.STOPPED, code, error.message)
    if lost_peer_behind(error) is not None:
        text = str(error) if isinstance(error, UserError) else _traceback(error)
        return Report(world.rank, Ending.PEER, code, text)
    if isinstance(error, UserError):
        if error.passing:
            return Report(world.rank, Ending.FAILED, code, str(error))
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    if isinstance(error, BrokenPipeError):
        return Report(world.rank, Ending.USER, code, "error: standard output was closed")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return Report(world.rank, Ending.USER, code, f"error: {error}")
    return Report(world.rank, Ending.FAILED, code, _traceback(error))


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _exit_code(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, UserError) and lost_peer_behind(error) is None:
        return error.exit_code
    return 1


def _report_stage(stage: Stage) -> None:
    fd = os.environ.get(REPORT_FD)
    if fd is not None:
        stage.send(int(fd))


def _report(report: Report, world: World) -> None:
    fd = os.environ.get(REPORT_FD)
    if fd is not None:
        report.send(int(fd))
        return
    # Without our launcher, which would choose among reports, every rank shows its own failure.
    if report.ending is Ending.STOPPED and report.rank != 0:
        return
    prefix = f"[rank {report.rank}] " if world.size > 1 else ""
    print(f"{prefix}{report.text}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code:
        # Skip destructors that could wait for peers that are gone.
        os._exit(code)
    sys.exit(0)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """The stop signals of this process. Create one, in the main thread.

    Args:
        report: reports to the launcher when a signal would lose nothing.
    """

    def __init__(self, report: Callable[[Stage], None] | None = None) -> None:
        self._noted = 0
        self._deferred = False
        self._report = report
        self._stage: Stage | None = None

    def install(self) -> None:
        """Handle the signals, and unblock them if a launcher blocked them."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def noted(self) -> int:
        """The first stop signal that arrived while deferred, or 0."""
        return self._noted

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals instead of raising."""
        self._deferred = True
        try:
            yield
        finally:
            self._enter(Stage.ENDING)
            self._deferred = False

    def stepped(self) -> None:
        """Report that a step was completed: from now on a stop request loses nothing."""
        self._enter(Stage.TRAINING)

    def _enter(self, stage: Stage) -> None:
        if self._report is not None and stage is not self._stage:
            self._report(stage)
        self._stage = stage

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        # A terminal sends Ctrl-C to every process of the job and the launcher forwards it too:
        # only the first counts.
        if self._noted:
            return
        self._noted = signum
        if not self._deferred:
            raise Stopped(signum, f"Stopped by {signal_name(signum)}; there was nothing to save.")


# Characters. Long enough for a traceback; short enough, at four bytes each, for the buffer of a
# pipe, so that a dying rank never waits for its launcher.
MAX_TEXT = 14 * 1024


class Stage(enum.Enum):
    """How far a rank is, for a launcher that may ask it to stop and continue later."""

    TRAINING = "training"  # it has completed a step; asked to stop, it saves
    ENDING = "ending"  # it takes no more steps; everything is saved

    @staticmethod
    def from_line(line: bytes) -> Stage | None:
        """Return the stage that a line names, or None if it belongs to a report."""
        return next((stage for stage in Stage if stage.value.encode() == line), None)

    def send(self, fd: int) -> None:
        """Write to the launcher's pipe."""
        _send(fd, self.value)


class Ending(enum.Enum):
    """Why a rank ended."""

    STOPPED = "stopped"  # because a signal asked it to
    USER = "user"  # an error that the user can fix
    FAILED = "failed"  # any other error
    PEER = "peer"  # another rank failed first


@dataclass(frozen=True)
class Report:
    """How one rank ended.

    Attributes:
        rank: the global rank.
        ending: why it ended.
        exit_code: the status that the process is about to exit with.
        text: one line for ``USER`` and ``STOPPED``, a traceback otherwise.
        time: seconds on the host's monotonic clock.
    """

    rank: int
    ending: Ending
    exit_code: int
    text: str
    time: float = field(default_factory=time.monotonic)

    def to_json(self) -> str:
        """Return one line of JSON; a text that is too long loses its middle."""
        text = self.text
        if len(text) > MAX_TEXT:
            half = MAX_TEXT // 2
            text = f"{text[:half]}\n  [...]\n{text[-half:]}"
        fields = {**asdict(self), "ending": self.ending.value, "text": text}
        return json.dumps(fields, ensure_ascii=False)

    @staticmethod
    def from_json(line: str | bytes) -> Report:
        """Read what :meth:`to_json` wrote."""
        fields = json.loads(line)
        return Report(**{**fields, "ending": Ending(fields["ending"])})

    def send(self, fd: int) -> None:
        """Write to the launcher's pipe."""
        _send(fd, self.to_json())


def _send(fd: int, line: str) -> None:
    with contextlib.suppress(OSError):  # it is no error if the launcher is gone
        os.write(fd, line.encode() + b"\n")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules at the start of a process without garbage collection; all of them stay alive.

    Python searches for garbage while torch and transformers create a million objects, and searches
    those again later and when the process ends. There is none: without the search, a rank that
    starts and ends takes 2.4 seconds of CPU time instead of 4.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
