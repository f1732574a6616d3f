"""Ranks that are forked from one process of the host, which has imported what they need.

    launcher ──starts──> fork server: imports, then waits for orders ──forks──> ranks
        └──────────────────────────── their parent ────────────────────────────> ranks

Imports are most of what a rank does before its first step, and of what a restart costs. The fork
server is the command of a rank with :data:`SERVER` in its environment: it runs up to
:func:`serve_forks`, which returns in ranks only. They are forked twice, and fall to the launcher as
the parent of orphans. So it watches and ends them like those that it starts itself, and they find
what those find: a session, an environment, output and random numbers of their own.

Where that is not certain, ranks start by themselves: where a library has left a thread running or
has opened a device while it was imported, neither of which survives a fork, and where a rank's
environment has a value that an import may have read otherwise. So do programs of users, who may set
variables before they import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from shardwise.elastic.hosts import Command
from shardwise.elastic.rank import STOP_SIGNALS, die_with_parent
from shardwise.elastic.world import PARENT_PID, threads_of_a_rank

SERVER = "SHARDWISE_FORK_SERVER"  # the descriptor of its socket

_log = logging.getLogger(__name__)

_GLANCE = 0.02  # seconds between looks whether a rank is still wanted
_PATIENCE = 120.0  # seconds for the imports of a fork server
_ANSWER = 10.0  # seconds for a fork, once it has imported
_LARGEST = 1 << 20  # bytes of an order
_PR_SET_CHILD_SUBREAPER = 36
#: What ranks have of their own. It is read by what they call, not by what they import.
_OWN = re.compile(
    "((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|CUDA_VISIBLE_DEVICES"
    "|(GLOO|NCCL)_SOCKET_IFNAME|TORCH_NCCL_ASYNC_ERROR_HANDLING|(TORCH_?ELASTIC|SHARDWISE)_.*"
)


class ForkServer:
    """The command of ranks, the same in every generation, and the process that forks them.

    Args:
        command: the program and its arguments, which calls :func:`serve_forks`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = [*command]
        self._environment: dict[str, str] = {}
        self._forking = threading.Lock()  # the launcher of replicas has an agent in each thread
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._has_forked = False  # which one that replaces it will, too
        self._has_answered = False  # the process of now

    def __call__(self, generation: int) -> Sequence[str]:
        """Return the command."""
        return self._command

    @contextlib.contextmanager
    def running(self, ranks: int) -> Iterator[None]:
        """Run the process during the context.

        Args:
            ranks: of this host, which share its cores.
        """
        self._environment = {"OMP_NUM_THREADS": threads_of_a_rank(ranks), **os.environ}
        self._start()
        try:
            yield
        finally:
            self._end()

    def fork(
        self, environment: Mapping[str, str], output: Sequence[int], is_over: Callable[[], bool]
    ) -> int | None:
        """Fork a rank, which leads a process group, as a child of this process.

        Args:
            environment: all of it.
            output: the descriptors of its standard output and standard error.
            is_over: whether to wait no longer until all is imported.

        Returns:
            Its process id; None: it has to be started otherwise.
        """
        both = environment.keys() | self._environment.keys()
        found = {name: (self._environment.get(name), environment.get(name)) for name in both}
        order = {name: now for name, (before, now) in found.items() if now != before}
        if other := [name for name in order if not _OWN.fullmatch(name)]:
            _log.debug("ranks are not forked: %s changed since the fork server began", other)
            return None
        words = json.dumps(order).encode()
        with self._forking:
            pid = self._order(words, output, is_over)
            if pid is None and self._has_forked and not is_over():  # it was killed or suspended
                self._start()
                pid = self._order(words, output, is_over)
            self._has_answered = pid is not None
            self._has_forked |= self._has_answered
        if pid is None:
            _log.debug("ranks are not forked: the fork server has ended, or was not waited for")
        return pid

    def _order(
        self, order: bytes, output: Sequence[int], is_over: Callable[[], bool]
    ) -> int | None:
        answer, reply = os.pipe()
        with open(answer, "rb") as answered, _parent_of_orphans():
            try:
                if self._orders is None:
                    return None
                socket.send_fds(self._orders, [order], [reply, *output])
            except OSError:  # it has ended
                return None
            finally:
                os.close(reply)
            deadline = time.monotonic() + (_ANSWER if self._has_answered else _PATIENCE)
            while not select.select([answered], [], [], _GLANCE)[0]:
                if is_over() or time.monotonic() > deadline:
                    self._end()
            # Nothing where no process is left that could answer.
            return int(os.read(answer, 32) or 0) or None

    def _start(self) -> None:
        self._end()
        self._has_answered = False
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {SERVER: str(theirs.fileno()), PARENT_PID: str(os.getpid())}
        # As in ranks that start by themselves, which inherit the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment | own,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._orders is not None:
            self._orders.close()
            self._orders = None


def running(command: Command, ranks: int) -> AbstractContextManager[None]:
    """Run the fork server of a command during the context, if it has one.

    Args:
        command: of ranks.
        ranks: of this host.
    """
    if isinstance(command, ForkServer):
        return command.running(ranks)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _parent_of_orphans() -> Iterator[None]:
    """Be the parent of processes below this one whose parent ends during the context."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


# -- in the fork server, and in ranks --------------------------------------------------------------


def serve_forks(prepare: Callable[[], object]) -> None:
    """Fork ranks if this process is a fork server, and return in each of them; else return at once.

    Args:
        prepare: imports what they need, on one thread and without a device.
    """
    number = os.environ.pop(SERVER, None)
    if number is None:
        return
    with socket.socket(fileno=int(number)) as orders:
        try:
            die_with_parent(int(os.environ[PARENT_PID]))
            devices = _open_devices()
            prepare()
            if _threads() > 1:  # BLAS ends its threads before a fork, and makes them anew if needed
                _forked_and_ended()
            if _threads() > 1 or _open_devices() - devices:
                os._exit(1)
            order, files, parent = _serve(orders)
        except BaseException:  # ranks that start by themselves say what it is
            os._exit(1)
    try:
        _become_rank(order, files, parent)
    except OSError:  # the launcher is gone, or is not the parent
        os._exit(1)


def _serve(orders: socket.socket) -> tuple[bytes, list[int], int]:
    """Fork for every order; return in ranks: the order, its files, and the parent that ends."""
    while True:
        order, files, _, _ = socket.recv_fds(orders, _LARGEST, 3)
        if not order:
            os._exit(0)
        child = os.fork()
        if not child:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            return order, files, parent
        os.waitpid(child, 0)
        for file in files:
            os.close(file)


def _become_rank(order: bytes, files: Sequence[int], parent: int) -> None:
    reply, *output = files
    os.setsid()
    for standard, file in enumerate(output, 1):
        os.dup2(file, standard)
        os.close(file)
    if sys.stdout is not None:  # else its file was closed before Python began
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    for name, value in json.loads(order).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Python does the same for its own. Accelerators draw their seeds when they are first used.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    while os.getppid() == parent:
        time.sleep(0.001)
    if os.getppid() != int(os.environ[PARENT_PID]):
        raise ProcessLookupError
    os.write(reply, str(os.getpid()).encode())
    os.close(reply)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_devices() -> set[str]:
    """Return the files of devices that this process has open, such as those of drivers."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which the folder is read
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {path for path in found if path.startswith("/dev/")}


def _forked_and_ended() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
