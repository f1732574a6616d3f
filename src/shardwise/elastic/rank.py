"""The life of one rank: tied to its launcher, and reporting how it ends.

SIGINT and SIGTERM end a rank at once, or after the current step. Before and after training there is
nothing to save: a signal raises :class:`Stopped` wherever the rank is. Inside ``with
signals.deferred():`` it is only noted, and the training loop checks for it between steps.

A rank reports in a file of its own: one line for every :class:`Stage`, then one JSON object, the
:class:`RankReport`. The time in it is from the machine's monotonic clock, which all processes of a
host share, so the launcher can tell which rank failed first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import errno
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shardwise.base import plain
from shardwise.base.errors import OffloadError, StoreError, UserError, lost_peer_behind
from shardwise.elastic import starting
from shardwise.elastic.errors import MovedOn, Parted, Stopped, signal_name
from shardwise.elastic.world import PARENT_PID, REPORT, STAYS, World, find_world, launched_here

# The disk is full or read-only: a traceback would not help.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_GLANCE = 0.01  # seconds between looks for the next world
_UNWRITTEN = 120  # Python's exit code if it could not write all output

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's agent reads it when this process has failed
_RUN_ID = "TORCHELASTIC_RUN_ID"
# Seconds. torch's agent looks ten times per second; one of another host has to meet this one's
# anew, which then restarts its ranks without counting it.
PATIENCE = 5.0


def run_rank(world: World, body: Callable[[World, StopSignals], None]) -> NoReturn:
    """Run ``body`` as one rank and end the process with its exit code.

    The exit code is 0 when ``body`` returns, 2 for a :class:`UserError` (unless it has another
    one), 128 + signal for :class:`Stopped`, and 1 for every other error. Any error raised from the
    loss of a peer counts as that loss: the same command may succeed later.
    """
    signals = StopSignals()
    try:
        signals.install()
        faulthandler.enable()
        if (parent := os.environ.get(PARENT_PID)) is not None:
            die_with_parent(int(parent))
        if (file := os.environ.get(REPORT)) is not None:
            with contextlib.suppress(OSError):  # the launcher is gone, or its disk is full
                starting.answer_to(Path(file))
                report_stage(Stage.STARTING)  # from now on the launcher may ask
        body(world, signals)
    except BaseException as error:  # the launcher must learn of it, whatever it is
        if lost_peer_behind(error) is not None and not signals.noted:
            let_the_first_failure_be_named()
        _end(report_end(world, error))  # without what may wait for peers that are gone
    leave(0)


def run_worker(world: World, body: Callable[[World, StopSignals], None]) -> None:
    """Run ``body`` as one rank in a process of another program, such as a worker of Ray Train.

    Unlike :func:`run_rank` it neither ends the process nor handles signals, which only the main
    thread may. The program that started the workers takes the first error that it sees for the
    cause. So a rank that has only lost a peer waits before it raises.

    Raises:
        BaseException: what ``body`` raises.
    """
    try:
        body(world, StopSignals())
    except BaseException as error:
        if lost_peer_behind(error) is not None:
            time.sleep(PATIENCE)
        raise


def report_end(world: World, error: BaseException) -> int:
    """Report that an error, or a request to stop, ends this rank; return its exit code."""
    report = RankReport(world.rank, *_ending(error))
    _report(report, world)
    return report.exit_code


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, for whatever reason.

    Args:
        parent: the id of the process that started this one.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def _ending(error: BaseException) -> tuple[Ending, int, str]:
    """Return why an error ends this rank, the exit code, and what to show."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    is_secondary = lost_peer_behind(error) is not None
    match error:
        case Stopped():
            return Ending.STOPPED, error.exit_code, str(error)
        case _ if is_secondary:
            return Ending.PEER, 1, str(error) if isinstance(error, UserError) else trace
        case UserError(passing=True):
            return Ending.FAILED, error.exit_code, str(error)
        case UserError():
            return Ending.USER, error.exit_code, f"error: {error}"
        case BrokenPipeError():
            return Ending.USER, 1, "error: standard output was closed"
        case OSError(errno=number) if number in _NO_ROOM:
            return Ending.USER, 1, f"error: {error}"
        case OffloadError() | StoreError():  # it says all that a user of the disk can do
            return Ending.FAILED, 1, str(error)
    return Ending.FAILED, 1, trace


def report_stage(stage: Stage) -> None:
    """Report how far this rank is; nothing happens without our launcher."""
    _send(stage.value)


def _report(report: RankReport, world: World) -> None:
    if _send(report.to_json()):
        return
    # Many ranks lose a peer, and none of them is the cause: one line is enough.
    shown = report.text.splitlines()[-1] if report.ending is Ending.PEER else report.text
    is_recorded = record_failure(shown, report.text, report.exit_code)
    # Without our launcher, which would choose among reports, every rank shows its own failure.
    if report.ending is Ending.STOPPED and report.rank != 0:
        return
    prefix = f"[rank {report.rank}] " if world.size > 1 else ""
    print(f"{prefix}{shown if is_recorded else report.text}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End this process with an exit code as Python does, but without the last part of its end.

    Up to there, all is the same: it waits for threads that are no daemons, calls what ``atexit``
    knows, and writes what files still hold. Then Python takes itself apart. A thread that needs it
    at this moment, as gloo's does to free a tensor, is ended by Python in the middle of C++, which
    aborts the process ("terminate called without an active exception").
    """
    for wait in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(KeyboardInterrupt, Stopped):  # which only end the wait, as there
            wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _write_files()
    _end(code)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # its file was closed before Python began
                stream.flush()
        except (OSError, ValueError):
            code = code or _UNWRITTEN
    os._exit(code)


def _write_files() -> None:
    """Write what files that are still open hold, as Python does when it frees them."""
    kinds = ((type(found), found) for found in gc.get_objects())
    files = [(kind, found) for kind, found in kinds if issubclass(kind, io.IOBase)]
    # Text goes into binary files, such as compressed ones, and these into those of Python itself.
    files.sort(
        key=lambda file: (not issubclass(file[0], io.TextIOBase), file[0].__module__ == "_io")
    )
    for kind, file in files:
        with contextlib.suppress(Exception):
            if file.closed or not file.writable():
                continue
            if kind.__module__ == "_io" or issubclass(kind, io.TextIOBase):
                file.flush()
            else:
                file.close()  # a compressed file has an end


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Asks a rank to go on in another world, after a step, with what it has in memory.
MOVES_ON = signal.SIGUSR1
#: What is noted then: less than any signal that asks to stop, which counts for more.
MOVE_ON = 1
#: The file beside a rank's report in which it finds its next world.
WORLD_FILE = "world"


def reset_in_children(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let processes that are forked from now on handle signals as Python does, not by ``handler``.

    Their parent ends them by SIGTERM and waits until they have ended, as a pool of processes does.
    """

    def reset() -> None:
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) == handler:
                default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
                signal.signal(signum, default)

    os.register_at_fork(after_in_child=reset)


class StopSignals:
    """The stop signals of this process. Create one, in the main thread."""

    def __init__(self) -> None:
        self._noted = 0
        self._deferred = False
        self._stage: Stage | None = None

    def install(self) -> None:
        """Handle the signals, and unblock them if a launcher blocked them."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._handle)
        if STAYS in os.environ:  # else the signal is the program's
            signal.signal(MOVES_ON, self._handle)
        reset_in_children(self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def noted(self) -> int:
        """The first stop signal that arrived while deferred, or 0."""
        return self._noted

    def agree(self, signum: int) -> None:
        """Note a signal that reached another rank: this one stops as well, and needs no second."""
        self._noted = self._noted or signum

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals instead of raising."""
        try:
            self._deferred = True
            yield
        finally:
            self._enter(Stage.ENDING)
            self._deferred = False

    def hold(self) -> None:
        """Note signals from now on, up to the end of the next time that they are deferred."""
        self._deferred = True

    def next_world(self, moved: MovedOn | None = None) -> World:
        """Wait until the launcher knows the world of this rank, and return it.

        Args:
            moved: why the rank has left the world before, if there was one.
        """
        self._noted = 0 if self._noted == MOVE_ON else self._noted
        if isinstance(moved, Parted):
            rank = int(os.environ["RANK"])
            _send(RankReport(rank, Ending.STOPPED, moved.exit_code, str(moved)).to_json())
        self._enter(Stage.WAITING)
        file = Path(os.environ[REPORT]).with_name(WORLD_FILE)
        while not file.exists():
            time.sleep(_GLANCE)
        os.environ.update(json.loads(file.read_text(encoding="utf-8")))
        file.unlink()
        self._enter(Stage.STARTING)
        world = find_world()
        assert world is not None
        return world

    def stepped(self) -> None:
        """Report that a step was completed: from now on a stop request loses nothing."""
        self._enter(Stage.TRAINING)

    def _enter(self, stage: Stage) -> None:
        if stage is not self._stage:
            report_stage(stage)
        self._stage = stage

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        # A terminal sends Ctrl-C to every process of the job and the launcher forwards it too:
        # only the first counts.
        if signum == MOVES_ON:
            self._noted = self._noted or MOVE_ON
            return
        if self._noted > MOVE_ON:
            return
        self._noted = signum
        if not self._deferred:
            raise Stopped(signum, f"Stopped by {signal_name(signum)}; there was nothing to save.")


# Characters. Long enough for a traceback, short enough for a terminal.
MAX_TEXT = 14 * 1024


class Stage(enum.Enum):
    """How far a rank is, for a launcher that may ask it to stop and continue later."""

    STARTING = "starting"  # it has not completed a step, and can be asked where it is
    TRAINING = "training"  # it has completed a step; asked to stop, it saves
    WAITING = "waiting"  # for its next world, with what it has in memory
    ENDING = "ending"  # it takes no more steps; everything is saved

    @staticmethod
    def from_line(line: bytes) -> Stage | None:
        """Return the stage that a line names, or None if it belongs to a report."""
        return next((stage for stage in Stage if stage.value.encode() == line), None)


class Ending(enum.Enum):
    """Why a rank ended."""

    STOPPED = "stopped"  # because a signal asked it to
    USER = "user"  # an error that the user can fix
    FAILED = "failed"  # any other error
    PEER = "peer"  # another rank failed first


@dataclass(frozen=True)
class RankReport:
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
        """Return one line, for :func:`plain.read`; a text that is too long loses its middle."""
        text = self.text
        if len(text) > MAX_TEXT:
            half = MAX_TEXT // 2
            text = f"{text[:half]}\n  [...]\n{text[-half:]}"
        return plain.written(replace(self, text=text)).decode()


def _send(line: str) -> bool:
    """Write a line to the launcher's file; return whether there is a launcher of ours."""
    file = os.environ.get(REPORT)
    if file is None:
        return False
    with contextlib.suppress(OSError):  # it is no error if the launcher is gone
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)
    return True


def let_the_first_failure_be_named() -> None:
    """Wait for torch's agent to end this rank, which has lost a peer and is not to blame.

    The agent takes the rank that it finds ended for the cause. It ends the others by SIGTERM. If
    it does not, the peer was on another host, and this rank must end by itself.
    """
    if _RUN_ID in os.environ and not launched_here():
        with contextlib.suppress(Stopped):
            time.sleep(PATIENCE)


def record_failure(line: str, text: str, exit_code: int) -> bool:
    """Write why this rank ends where torch's agent looks, in the format of its ``record``.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors``, which takes seconds
    to import.

    Args:
        line: what ``torchrun`` shows.
        text: all that is known, for who opens the file.
        exit_code: of this process.

    Returns:
        Whether there is such an agent, and the file was written.
    """
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return False
    when = str(int(time.time()))
    message = {
        "message": text,
        "errorCode": exit_code,
        "extraInfo": {"py_callstack": line, "timestamp": when},
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules at the start of a process without garbage collection; all of them stay alive.

    Python searches for garbage while torch and transformers create a million objects, and searches
    those again later and when the process ends. There is none: without the search, a rank that
    starts and ends takes 2.4 seconds of CPU time instead of 4.
    """
    collects = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
