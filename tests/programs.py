"""Run Python programs in processes that have imported torch already.

    program = start_program(["-m", "shardwise", "train", "lm"], folder=folder)
    out, err = program.communicate(timeout=60)

A new interpreter takes seconds to import torch and transformers, on every rank. These programs are
forked instead, from the server of :mod:`tests.harness`, and so are the programs that they start in
turn: a launcher's ranks, or those of ``torchrun``. Everything else is as the program's user has it:
arguments, environment, folder, streams, signals, exit codes, parents and children.

The command line as it really starts is tested in ``tests/cli/test_train_lm.py``, by ``make wheel``,
and by whoever types ``make train``.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import gc
import hmac
import importlib
import math
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, NoReturn, Self
from unittest import mock

import psutil
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from shardwise.elastic import call
from shardwise.elastic.starting import STACKS
from tests.harness import start_server


class Program:
    """A running program, with what tests use of :class:`subprocess.Popen`.

    Attributes:
        stdout: its standard output, if that is a pipe.
        stderr: its standard error, if that is a pipe.
    """

    def __init__(
        self, process: ForkServerProcess, stdout: IO[str] | None, stderr: IO[str] | None
    ) -> None:
        self.stdout, self.stderr = self._pipes = stdout, stderr
        self._process = process

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, ``-9`` when killed by signal 9; ``None`` while the program runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, if the program has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a program", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes to their ends, and wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        pool = ThreadPoolExecutor(2)
        try:
            reads = [pool.submit(pipe.read) if pipe else None for pipe in self._pipes]
            out, err = ("" if read is None else read.result(_rest(deadline)) for read in reads)
        except TimeoutError:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a program", timeout) from None
        finally:
            pool.shutdown(wait=False)
        self.close()
        self.wait(_rest(deadline))
        return out, err

    def close(self) -> None:
        """Close the pipes, whose rest nobody reads."""
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program, but not what it has started."""
        self.send_signal(signal.SIGKILL)


def _rest(deadline: float) -> float | None:
    """The seconds until a deadline; ``None`` if there is none."""
    return None if deadline == math.inf else max(deadline - time.monotonic(), 0.0)


def shell_environment(*without: str) -> dict[str, str]:
    """The environment of a user's shell: this one, without a world, and with one thread a process.

    Args:
        without: more variables to leave out.
    """
    names = {"RANK", "WORLD_SIZE", "SHARDWISE_TRANSPORT", *without}
    return {**{k: v for k, v in os.environ.items() if k not in names}, "OMP_NUM_THREADS": "1"}


def start_program(
    words: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str] | None = None,
    out: int | IO[str] = subprocess.PIPE,
    err: int | IO[str] = subprocess.PIPE,
    enter: Callable[[], object] | None = None,
) -> Program:
    """Start ``python WORDS``.

    Args:
        words: what follows ``python``.
        folder: where it runs.
        env: its environment; ``None`` for that of this process.
        out: standard output: a file, or a pipe.
        err: standard error.
        enter: called first in the process, which has one thread then; it is pickled.
    """
    ends, pipes = [], []
    streams: list[IO[str] | None] = []
    for wanted in (out, err):
        if wanted == subprocess.PIPE:
            mine, other = os.pipe()
            ends.append(other)
            pipes.append(other)
            streams.append(os.fdopen(mine, "r"))
        else:
            ends.append(wanted if isinstance(wanted, int) else wanted.fileno())
            streams.append(None)
    process = start_server().Process(
        target=_begin,
        args=(list(words), folder, dict(os.environ if env is None else env), _Ends(ends), enter),
        daemon=True,
    )
    process.start()
    for pipe in pipes:
        os.close(pipe)
    return Program(process, streams[0], streams[1])


def ranks_of(launcher: int) -> list[psutil.Process]:
    """Return the ranks that a launcher has started, in their order, once they have begun.

    Beside them it may have the process from which they are forked.
    """
    found = sorted(psutil.Process(launcher).children(), key=lambda child: child.pid)
    return [
        child for child in found if any(Path(f.path).name == STACKS for f in child.open_files())
    ]


@contextlib.contextmanager
def forked_agents() -> Iterator[None]:
    """Fork the agents of :func:`shardwise.launch`, and so their ranks.

    Else each is a new interpreter, which takes seconds to import what agents and ranks use.
    """

    def start(command: list[str], *, stdout: int | None, stderr: int | None, **_: Any) -> Program:
        start_server()
        server: Any = forkserver._forkserver
        parent, *numbers = command[-3:]  # which an agent must not outlive
        assert parent == str(os.getpid())
        return start_program(
            [*command[1:-3], str(server._forkserver_pid), *numbers],
            folder=Path.cwd(),
            out=1 if stdout is None else stdout,
            err=2 if stderr is None else stderr,
            enter=os.setsid,
        )

    constants = {"DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    with mock.patch.object(call, "subprocess", types.SimpleNamespace(Popen=start, **constants)):
        yield


class _Ends:
    """Standard output and error of a program, on their way to it."""

    def __init__(self, handles: Sequence[int]) -> None:
        self._handles = handles

    def __getstate__(self) -> list[Any]:
        return [DupFd(handle) for handle in self._handles]

    def __setstate__(self, sent: list[Any]) -> None:
        self._handles = [each.detach() for each in sent]

    def install(self) -> None:
        """Make them this process's own."""
        for handle, number in zip(self._handles, (1, 2), strict=True):
            os.dup2(handle, number)


def _begin(
    words: list[str],
    folder: Path,
    env: dict[str, str],
    ends: _Ends,
    enter: Callable[[], object] | None,
) -> None:
    """Become the program, in a process that the server has forked."""
    ends.install()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _disown()
    if enter is not None:
        enter()
    # In the class: modules that the server has imported hold it under names of their own.
    subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
    hmac.digest = _digest
    # For each line of its log, torch's rendezvous looks for this in the thousands of modules here.
    dynamic_rendezvous.get_method_name = lambda depth=2: "a method"
    _become(words, env, str(folder))


_hashing = threading.Lock()
os.register_at_fork(
    before=_hashing.acquire, after_in_parent=_hashing.release, after_in_child=_hashing.release
)
_openssls_digest = hmac.digest


def _digest(key: Any, msg: Any, digest: Any) -> bytes:
    """Be ``hmac.digest``, during which nothing is forked.

    It takes locks of OpenSSL while other threads run. A launcher signs messages in threads beside
    the one that starts ranks. A rank that was forked meanwhile would have the locks for good, and
    wait for itself as soon as it opens a connection by TLS.
    """
    with _hashing:
        return _openssls_digest(key, msg, digest)


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork(self: Any, args: Any, executable: Any, *rest: Any) -> None:
    """Start a Python program by forking this one, and any other program as ever."""
    preexec, close, keep, cwd, env, _, _, shell, *pipes = rest[:14]
    words: list[Any] = [args] if isinstance(args, str | os.PathLike) else list(args)
    if shell or preexec is not None or not close or words[0] != sys.executable:
        _execute(self, args, executable, *rest)
        return
    streams = pipes[0], pipes[3], pipes[5]
    session = _Session.NEW if rest[19] else _Session.SAME
    sys.stdout.flush()  # or the child would write it, too
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(words[1:], streams, {*keep, *_inner_pipes(pipes)}, env, cwd, session)
    self.pid = pid
    self._child_created = True
    self._close_pipe_fds(*pipes)


def _inner_pipes(without: Sequence[int]) -> list[int]:
    """Return the pipes whose ends are both in this process.

    libuv, behind torch's store, has one. After every fork it closes the descriptors that the parent
    had, which must be its own still.
    """
    ends: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        for handle in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                found = os.fstat(handle)
                if stat.S_ISFIFO(found.st_mode) and handle > 2 and handle not in without:
                    ends.setdefault(found.st_ino, []).append(handle)
    return [handle for each in ends.values() if len(each) > 1 for handle in each]


class _Session(enum.Enum):
    SAME = "same"
    NEW = "new"


def _be_child(
    words: list[str],
    streams: Sequence[int],
    keep: Collection[int],
    env: Mapping[str, str] | None,
    cwd: str | None,
    session: _Session,
) -> NoReturn:
    """Become a program that another one has started, in a process that was just forked."""
    try:
        sys.stdout = sys.stderr = None
        for stream, number in zip(streams, range(3), strict=True):
            if stream != -1:
                os.dup2(stream, number)
        first = 3
        for handle in sorted({*keep, os.sysconf("SC_OPEN_MAX")}):
            os.closerange(first, handle)
            first = handle + 1
        for number in signal.valid_signals():  # as execve() does
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        if session is _Session.NEW:
            os.setsid()
        _disown()
        _become(words, dict(os.environ if env is None else env), cwd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _disown() -> None:
    """Leave alone what a process has had before its fork: it is the parent's to close or delete.

    Of torch's libraries of operators alone, which are as many, that takes 40 ms at the end.
    """
    gc.freeze()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False


def _become(words: list[str], env: dict[str, str], cwd: str | None) -> NoReturn:
    """Run ``python WORDS`` in this process, and end it."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        for name in ("huggingface_hub.constants", "datasets.config"):
            if name in sys.modules:
                importlib.reload(sys.modules[name])  # it reads variables as it is imported
        if cwd is not None:
            os.chdir(cwd)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[misc]
        _forget_helpers()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        for path in paths:  # what interpreters import from there as they start
            if (custom := Path(path) / "sitecustomize.py").exists():
                runpy.run_path(str(custom))
        try:
            _run(words)
            code = 0
        except SystemExit as ended:
            code = _exit_code(ended)
        except KeyboardInterrupt:
            traceback.print_exc()
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _forget_helpers() -> None:
    """Forget the helpers of ``multiprocessing``, whose pipes this process has closed."""
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    server: Any = forkserver._forkserver
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _run(words: list[str]) -> None:
    """Do what the interpreter does with its arguments."""
    is_safe = False
    while words and words[0] in ("-P", "-W", "-u"):
        option = words.pop(0)
        if option == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
        is_safe |= option == "-P"
    what = words.pop(0)
    if what == "-m":
        name = words.pop(0)
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = [name, *words]
        with warnings.catch_warnings():  # the module may have been imported with the rest
            warnings.filterwarnings("ignore", ".*found in sys.modules after import")
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [what, *words]
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code & 255
    print(ended.code, file=sys.stderr)
    return 1
