"""The life of a rank that runs a program of the user's: a script, a module or a function.

    python -P -u -m shardwise.elastic.program FILE ARGUMENTS
    python -P -u -m shardwise.elastic.program -m MODULE ARGUMENTS

The program sees what ``python FILE ARGUMENTS`` would show it: ``__main__``, ``sys.argv`` and
``sys.path``, Python's own handling of Ctrl-C, ``atexit``. It needs no import of this package.
Around it, the launcher learns why a rank ends at the moment when it does, so that the first of
several failures is known: an exception with its traceback, ``sys.exit`` with its code, or a signal.

A program that handles signals by itself, or that calls
:func:`~shardwise.elastic.rank.run_rank`, replaces what is set up here.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import NoReturn

from shardwise.base.errors import UserError
from shardwise.elastic.errors import Stopped, signal_name
from shardwise.elastic.rank import (
    STOP_SIGNALS,
    die_with_parent,
    leave,
    report_end,
    reset_in_children,
)
from shardwise.elastic.world import PARENT_PID, World, find_world

_OURS = str(Path(__file__).parent)
_USAGE = 2  # exit code for a wrong command line; the same command would fail again


def command_of(words: Sequence[str]) -> list[str]:
    """Return the command of a rank.

    Args:
        words: a file and its arguments, or ``-m``, a module and its arguments.
    """
    # -P: what the program may import is decided here. -u: a rank that is killed flushes nothing.
    return [sys.executable, "-P", "-u", "-m", "shardwise.elastic.program", *words]


def run_program(program: Callable[[], object]) -> NoReturn:
    """Run a program as a rank, and end the process as Python would.

    The exit code is the program's own. It is 1 after an exception, 2 after a :class:`UserError`,
    and 128 + signal if a signal stopped the program.
    """
    world = find_world()
    assert world is not None, "this is no rank"
    try:
        signal.signal(signal.SIGTERM, _stop)
        reset_in_children(_stop)
        # The launcher blocked them until a rank can tell a stop from a crash.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        faulthandler.enable()
        if (parent := os.environ.get(PARENT_PID)) is not None:
            die_with_parent(int(parent))
        program()
    except SystemExit as ended:
        code = 0
        if ended.code not in (None, 0):
            code = report_end(world, _exit_of(ended, world))
    except KeyboardInterrupt:
        code = report_end(world, _stopped(signal.SIGINT))
    except BaseException as error:
        error = error.with_traceback(own_frames(error))
        code = report_end(world, named(error))
    else:
        code = 0
    leave(code)


def _stop(signum: int, frame: FrameType | None) -> None:
    del frame
    raise _stopped(signum)


def _stopped(signum: int) -> Stopped:
    return Stopped(signum, f"Stopped by {signal_name(signum)}.")


class _ExitedError(UserError):
    """The program ended itself with an exit code that means failure."""

    passing = True

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _exit_of(ended: SystemExit, world: World) -> UserError:
    if not isinstance(ended.code, int):
        return _ExitedError(str(ended.code), 1)
    if ended.code == _USAGE:
        return UserError(f"rank {world.rank} of {world.size} ended with exit code {_USAGE}")
    return _ExitedError(f"ended with exit code {ended.code}", ended.code & 255)


def own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error without the frames that led to the program."""
    frames = error.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if not (file.startswith(_OURS) or file == "<frozen runpy>"):
            break
        frames = frames.tb_next
    return frames


def named(error: BaseException) -> BaseException:
    """Return a lost peer for an error by which ``torch.distributed`` reports one.

    The program may have called torch itself. What the loss of a rank causes on another one may be
    reported first, and must not be mistaken for the reason.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or not _is_torchs(error):
        return error
    from shardwise.transport.peers import Peers, how_lost

    how = how_lost(error)
    if how is None:
        return error
    lost = Peers().lost("a collective", how=how)
    lost.__cause__ = error
    return lost


def _is_torchs(error: BaseException) -> bool:
    """Whether a collective or a backward of torch raised an error, not the program."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].startswith(("torch.distributed", "torch.autograd"))


def _run_file(path: str, arguments: list[str]) -> None:
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv[:] = [name, *arguments]
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # of something else, which a package of that name imports
        found = None
    if found is None:
        raise UserError(f"--module: found {name}, expected a module that Python can import")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _main() -> NoReturn:
    first, *rest = sys.argv[1:]
    if first == "-m":
        run_program(lambda: _run_module(rest[0], rest[1:]))
    run_program(lambda: _run_file(first, rest))


if __name__ == "__main__":
    _main()
