"""Private names of torch's elastic agent, which leaves methods with such names to subclasses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_Fork = Callable[[Mapping[str, str], Sequence[int]], int | None]

_processes: Any = api
_POLL = 0.005  # seconds between looks whether a process has ended
_starting = threading.Lock()  # agents may start processes in several threads


class LocalAgent(LocalElasticAgent):
    """Torch's agent of the ranks of one host, with public names for what a subclass may change."""

    def start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes of a world; return their ids by local rank."""
        with _forking(self.fork):
            return dict(super()._start_workers(worker_group))

    def fork(self, environment: Mapping[str, str], output: Sequence[int]) -> int | None:
        """Fork a process in place of starting its command.

        Args:
            environment: all of it.
            output: the descriptors of its standard output and standard error.

        Returns:
            Its id: a child of this process, which leads a process group. None: it is to be started.
        """

    def stop_workers(self, worker_group: WorkerGroup) -> None:
        """End the processes, before others are started in their place."""
        super()._stop_workers(worker_group)

    def monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the processes once."""
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def before_shutdown(self) -> None:
        """Do what has to be done before the agent ends whatever still runs."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:  # torch 2.12 added an argument
        self.before_shutdown()
        super()._shutdown(*args, **kwargs)


class _Forked:
    """A child process that was forked, as torch's agent uses one of :mod:`subprocess`.

    Args:
        pid: its id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        """Wait until the process has ended, and return its exit code.

        Args:
            timeout: seconds.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL)
        return code


class _ForkingHandler(SubprocessHandler):
    """Forks the process, or else starts it."""

    def __init__(self, fork: _Fork, **process: Any) -> None:
        self._fork = fork
        super().__init__(**process)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        files = enumerate((self._stdout, self._stderr), 1)
        output = [standard if file is None else file.fileno() for standard, file in files]
        pid = self._fork(env, output)
        return super()._popen(args, env) if pid is None else _Forked(pid)


@contextlib.contextmanager
def _forking(fork: _Fork) -> Iterator[None]:
    """Let torch's agents fork the processes that they start during the context."""
    with _starting:
        made = _processes.get_subprocess_handler
        _processes.get_subprocess_handler = lambda **process: _ForkingHandler(fork, **process)
        try:
            yield
        finally:
            _processes.get_subprocess_handler = made
