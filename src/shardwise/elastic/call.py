"""A function of the user's as the ranks of a job, from a program or a notebook.

    caller (launch)  ──>  agent (a process of its own)  ──>  ranks
        writes call           starts and watches ranks,          write value-RANK
        reads values,         writes account                     or error-RANK
        or raises

They exchange files in a folder that only the user can read. The agent is a process of its own since
it takes signals over, which a thread or a notebook must not do, and since nothing is forked from
the caller, which may have the threads of torch.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import io
import json
import linecache
import os
import pickle
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn, TypeVar

from shardwise.base.arguments import check_arguments
from shardwise.base.errors import RankFailedError, lost_peer_behind
from shardwise.elastic.errors import signal_name
from shardwise.elastic.program import named, own_frames, run_program
from shardwise.elastic.rank import die_with_parent
from shardwise.elastic.restarts import run_job
from shardwise.elastic.world import most_ranks

T = TypeVar("T")

_POLL = 0.05  # seconds between looks at the agent
_FIRST = re.compile(r"^error: (rank \d+ of \d+) ", re.MULTILINE)  # of an agent's account

# Every process of the job imports what the caller can import.
_START = """\
import json, signal, sys
from pathlib import Path
if sys.argv[1] == "agent":  # which handles signals later: until then, one ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:] = json.loads((Path(__file__).parent / "path.json").read_text())
from shardwise.elastic.call import main
main(Path(__file__).parent, *sys.argv[1:])
"""


def launch(
    function: Callable[..., T], args: Sequence[Any] = (), nproc: int = 1, *, max_restarts: int = 0
) -> list[T]:
    """Call a function on every rank of a new job on this host, and return what each one returned.

    Each rank is a new process, with the variables of ``torchrun`` in its environment, so that
    ``torch.distributed.init_process_group()`` needs no arguments. The function may be defined
    anywhere: in a module, in ``__main__``, in a cell of a notebook, inside another function. It,
    its arguments and what it returns are copied with cloudpickle. What it uses of its module, it
    finds as a module imports it, or, from ``__main__``, as it is now. Tensors that it returns
    should be on the CPU.

    What rank 0 prints is shown; that of the others is shown if they crash. Ctrl-C, or the interrupt
    of a notebook, stops all ranks. For several hosts, start a script with ``shardwise run`` on each
    of them: the values of another host have no way back to this process.

    Args:
        function: called as ``function(*args)``.
        args: a tuple or list, the same for every rank.
        nproc: number of ranks; if they are more than this host can carry, the variable
            ``SHARDWISE_MOST_RANKS`` has to allow it.
        max_restarts: how often to call the function again, on all ranks, after a rank failed. It
            should continue from a checkpoint of its own.

    Returns:
        What each rank returned, by rank.

    Raises:
        ValueError: a number is out of range.
        TypeError: an argument is no function, no tuple, or cannot be pickled; or what a rank
            returned cannot be pickled.
        RuntimeError: this process is a rank itself.
        RankFailedError: a rank was killed or ended by itself, or raised an exception that cannot
            be pickled.
        Exception: any exception that a rank raised first, of its own type. Its cause shows the
            traceback of the rank.
        KeyboardInterrupt: the ranks were stopped.
    """
    check_arguments(launch, locals())
    _check(nproc, max_restarts)
    with tempfile.TemporaryDirectory(prefix="shardwise-launch-") as name:
        folder = Path(name)
        (folder / "start.py").write_text(_START)
        (folder / "path.json").write_text(json.dumps(sys.path))
        (folder / "call").write_bytes(_pickled(function, args))
        code = _run_agent(
            [*_command(folder), "agent", *map(str, (os.getpid(), nproc, max_restarts))]
        )
        if code == 0:
            return [_value(folder, rank, nproc) for rank in range(nproc)]
        raise _error(folder, code)


# -- the caller ------------------------------------------------------------------------------------


def _check(nproc: int, max_restarts: int) -> None:
    for name, number, least in (("nproc", nproc, 1), ("max_restarts", max_restarts, 0)):
        if not isinstance(number, int) or number < least:
            raise ValueError(f"{name}: found {number!r}, expected a whole number, {least} or more")
    most, expected = most_ranks()
    if nproc > most:
        raise ValueError(f"nproc: found {nproc}, expected {expected}")
    if "RANK" in os.environ:
        raise RuntimeError(
            f"launch: found RANK={os.environ['RANK']} in the environment, expected a process that "
            "is no rank. If the function's module calls launch where it is imported, put the call "
            'under if __name__ == "__main__":'
        )


def _command(folder: Path) -> list[str]:
    return [sys.executable, "-P", "-u", str(folder / "start.py")]


def _run_agent(command: list[str]) -> int:
    """Run the agent, show what its ranks print, and return its exit code.

    Raises:
        KeyboardInterrupt: the user interrupted the ranks, and they have ended.
    """
    # A notebook shows what is written to its streams, not what reaches the files of its kernel.
    is_plain = sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
    pipe = None if is_plain else subprocess.PIPE
    # In a session of its own, so that Ctrl-C in a terminal reaches it once: from here.
    agent = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    )
    interrupts = 0
    with agent, selectors.DefaultSelector() as ready:
        for mine, stream in ((agent.stdout, sys.stdout), (agent.stderr, sys.stderr)):
            if mine is not None:
                decoder = codecs.getincrementaldecoder("utf-8")("replace")
                ready.register(mine, selectors.EVENT_READ, (stream, decoder))
        try:
            while agent.poll() is None:
                try:
                    _show_output(ready, _POLL)
                except KeyboardInterrupt:
                    interrupts += 1
                    agent.send_signal(signal.SIGINT)
            while _show_output(ready, 0):
                pass
        finally:
            agent.kill()  # where it has not ended; the system then kills its ranks
    if interrupts:
        raise KeyboardInterrupt
    return agent.returncode


def _show_output(ready: selectors.BaseSelector, seconds: float) -> bool:
    """Wait for output and show it; return whether there was some."""
    found = False
    for key, _ in ready.select(seconds):
        chunk = os.read(key.fd, 65536)
        if not chunk:
            ready.unregister(key.fileobj)
            continue
        found = True
        stream, decoder = key.data
        stream.write(decoder.decode(chunk))
        stream.flush()
    return found


def _value(folder: Path, rank: int, nproc: int) -> Any:
    file = folder / f"value-{rank}"
    if not file.exists():
        raise RankFailedError(f"rank {rank} of {nproc} ended without returning, with exit code 0")
    return pickle.loads(file.read_bytes())


def _error(folder: Path, code: int) -> Exception:
    """Return the error of the rank that failed first.

    Args:
        folder: of the job.
        code: exit code of the agent.
    """
    if code < 0:
        return RankFailedError(
            f"the process that started the ranks was killed by {signal_name(-code)}"
        )
    account = folder / "account"
    text = account.read_text().strip() if account.exists() else ""
    failures: list[_RankFailure] = [
        pickle.loads(file.read_bytes()) for file in folder.glob("error-*")
    ]
    # A rank that was killed, or has ended itself, has left no error, and may have caused others'.
    if first := _FIRST.findall(text):
        failures = [failure for failure in failures if failure.who == first[-1]]
    if failures:
        return min(failures, key=lambda failure: (failure.is_secondary, failure.time)).error()
    return RankFailedError(text.removeprefix("error: ") or f"the ranks ended with exit code {code}")


class _RankError(Exception):
    """Shows where a rank raised an exception, as the cause of the same exception in the caller."""


@dataclass(frozen=True)
class _RankFailure:
    """An exception that a rank raised.

    Attributes:
        who: ``rank 1 of 2``.
        is_secondary: whether another rank failed first.
        time: when, in seconds on the host's monotonic clock.
        text: the traceback.
        pickled: the exception, or nothing if it cannot be pickled.
    """

    who: str
    is_secondary: bool
    time: float
    text: str
    pickled: bytes

    def error(self) -> Exception:
        """Return the exception, or an error of our own that shows it."""
        text = f"{self.who} failed:\n{self.text}"
        # Classes of exceptions may take other arguments than those that they pass on.
        with contextlib.suppress(Exception):
            error = pickle.loads(self.pickled)
            if isinstance(error, Exception):
                error.__cause__ = _RankError(text)
                return error
        return RankFailedError(text)


# -- pickling --------------------------------------------------------------------------------------


def _pickled(function: object, args: Sequence[object]) -> bytes:
    """Pickle a call.

    Raises:
        TypeError: names what cannot be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        """Keeps the names of files, which tracebacks show: cloudpickle 3.1.3 leaves them out."""

        def reducer_override(self, obj: object) -> Any:
            if not isinstance(obj, CodeType):
                return super().reducer_override(obj)
            made, args, *_ = self.dispatch_table[CodeType](obj)
            return _code, (made, args, obj.co_filename)

    data = io.BytesIO()
    try:
        Pickler(data).dump((function, tuple(args), _cells()))
    except Exception as error:
        parts = [("function", function), *((f"args[{i}]", arg) for i, arg in enumerate(args))]
        found = next(filter(None, (_unpicklable(*part) for part in parts)), "the call")
        raise TypeError(f"launch: ranks cannot have {found}: {error}") from None
    return data.getvalue()


def _code(made: Callable[..., CodeType], args: tuple[object, ...], file: str) -> CodeType:
    return made(*args).replace(co_filename=file)


def _cells() -> dict[str, Any]:
    """Return the lines of a notebook's cells, which tracebacks show and no file has."""
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None  # of a file, it would be the time of its change
    }


def _unpicklable(name: str, value: object, outer: tuple[object, ...] = ()) -> str | None:
    """Name the innermost part of a value that cannot be pickled; None if it can be."""
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        if any(each is value for each in outer):
            return None
        around = (*outer, value)
        inner = (_unpicklable(f"{name}{key}", part, around) for key, part in _parts_of(value))
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return next(filter(None, inner), f"{name}, a {kind.removeprefix('builtins.')}")
    return None


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    """Return what a value holds, and how it is found there."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        for key, part in {**used.globals, **used.nonlocals}.items():
            yield f"'s {key}", part
    else:
        yield from ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())


# -- the agent and the ranks -----------------------------------------------------------------------


def main(folder: Path, role: str, *words: str) -> NoReturn:
    """Be a process of the job.

    Args:
        folder: of the job.
        role: ``agent`` or ``rank``.
        words: of an agent: the process id of the caller, the number of ranks, and of restarts.
    """
    if role == "rank":
        run_program(lambda: _call(folder))
    parent, nproc, restarts = map(int, words)
    die_with_parent(parent)
    account = io.StringIO()  # of the last attempt

    def command(attempt: int) -> list[str]:
        if attempt:
            print(account.getvalue(), end="", file=sys.__stderr__, flush=True)
            account.seek(account.truncate(0))
        for file in (*folder.glob("value-*"), *folder.glob("error-*")):
            file.unlink()
        return [*_command(folder), "rank"]

    with contextlib.redirect_stderr(account):
        code = run_job(command, nproc, restarts)
    (folder / "account").write_text(account.getvalue())
    sys.exit(code)


def _call(folder: Path) -> None:
    """Call the function as this rank, and write what it returned or raised."""
    import cloudpickle

    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        function, args, cells = pickle.loads((folder / "call").read_bytes())
        linecache.cache.update(cells)
        value = function(*args)
        try:
            data = cloudpickle.dumps(value)
        except Exception as error:
            part = _unpicklable("value", value)
            message = f"rank {rank} of {size} cannot return its value: {part}: {error}"
            raise TypeError(message) from None
    except Exception as error:
        failed_at = time.monotonic()
        error = error.with_traceback(own_frames(error))
        text = "".join(traceback.format_exception(error)).rstrip()
        is_secondary = lost_peer_behind(named(error)) is not None
        pickled = b""
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
        failure = _RankFailure(f"rank {rank} of {size}", is_secondary, failed_at, text, pickled)
        new = folder / f"new-{rank}"
        new.write_bytes(pickle.dumps(failure))
        new.rename(folder / f"error-{rank}")  # it may be killed while it writes
        raise
    (folder / f"value-{rank}").write_bytes(data)
