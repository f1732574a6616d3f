"""Worlds: a set of processes for each contender, which work when called and sleep in between.

Contenders never share a process, a process group or an allocator, so none can warm, fragment or
slow another; yet they can take turns within one run, so that noise of the machine hits all alike:

    parent ──pipe──> rank 0 ┐                  parent ──pipe──> rank 0 ┐
           ──pipe──> rank 1 ┘ world "ours"            ──pipe──> rank 1 ┘ world "fsdp2"

Each rank makes one object, the *worker*, and then answers calls of its methods. Between calls it is
blocked in a read of its pipe and takes no processor time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from _devices import take_gpu
from _hosts import Host

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # A process that has asked CUDA itself for its devices cannot be forked: ask the driver's tool.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

#: Of the processor time that the kernel counts, in a second.
TICKS = os.sysconf("SC_CLK_TCK")
_PRELOAD = [
    "torch._dynamo",  # which a process's first optimizer imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
]


class WorldError(RuntimeError):
    """A rank raised, died or did not answer; the message says which and holds its traceback."""


class World:
    """The ranks of one contender.

    Args:
        name: for messages.
        ranks: how many processes to start.
        factory: makes the worker, in each process, once its process group exists.
        args: what the factory is called with; must be picklable, as the factory must.
        device: ``"cpu"`` or ``"cuda"``. If there are fewer GPUs than ranks, several share one.
        backend: of the process group; by default gloo on CPUs, NCCL on GPUs.
        env: environment variables of the processes, beside one thread for each math library.
        exec_each: start every process as a new interpreter, which a C library needs that reads
            its settings from ``env``, and which shares no page with another. Else processes are
            forked from a server that has imported torch and computed nothing: seconds faster.
        timeout: seconds that the ranks have to start, and to answer a call.
        hosts: where the ranks run, as many of them on each; by default here.
        port: of the first host, where ranks on ``hosts`` meet; one world at a time can have it.

    Raises:
        WorldError: a rank could not start.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        factory: Callable[..., object],
        *args: object,
        device: str = "cpu",
        backend: str | None = None,
        env: Mapping[str, str] | None = None,
        exec_each: bool = False,
        timeout: float = 600,
        hosts: Sequence[Host] = (),
        port: int = 29500,
    ) -> None:
        self.name = name
        self._timeout = timeout
        self._store: TCPStore | None = None
        if not hosts:
            # The store lives here, on a port that the kernel chose: there is no port to race for.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        context: BaseContext = multiprocessing.get_context("spawn" if exec_each else "forkserver")
        context.set_forkserver_preload(_PRELOAD)
        backend = backend or ("nccl" if device == "cuda" else "gloo")
        variables = {**_ONE_THREAD, **(env or {})}
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        if not exec_each:
            with mock.patch.dict(
                os.environ, _ONE_THREAD
            ):  # of the server, so of all that it ever forks
                forkserver.ensure_running()
        with mock.patch.dict(os.environ, variables):
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                host = hosts[rank * len(hosts) // ranks] if hosts else None
                meeting = (host, hosts[0].address if hosts else "127.0.0.1", port)
                limit = timedelta(seconds=timeout)
                group = {"backend": backend, "rank": rank, "world_size": ranks, "timeout": limit}
                process = context.Process(  # type: ignore[attr-defined]  # of every context
                    target=_serve,
                    args=(theirs, meeting, group, device, variables, factory, args),
                    name=f"{name}-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        self._collect("start")

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of ranks."""
        return [process.pid for process in self._processes if process.pid is not None]

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank's worker at once.

        Returns:
            What each rank returned, in the order of ranks.

        Raises:
            WorldError: a rank raised, died or did not answer in time. The world is closed.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # _collect() will tell why
                pipe.send((method, args))
        return self._collect(method)

    def cpu_seconds(self) -> float:
        """Return the processor time that all ranks have taken so far."""
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2] for pid in self.pids]
        times = [stat.split()[11:13] for stat in stats]
        return sum(int(user) + int(system) for user, system in times) / TICKS

    def close(self) -> None:
        """End the processes and wait for them. Closing twice does nothing.

        Raises:
            WorldError: a rank was asked to end and did not, so that it had to be killed.
        """
        stuck = []
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                stuck.append(process.name)
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if stuck:
            raise WorldError(f"{self.name}: {', '.join(stuck)} did not end and had to be killed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()
        self.close()

    def _collect(self, what: str) -> list[Any]:
        """Wait for one answer from every rank."""
        answers: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=self._timeout)
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} did not answer {what!r} in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._fail(f"rank {rank} died in {what!r}")
                if not ok:
                    self._fail(f"rank {rank} failed in {what!r}:\n{answer}")
                answers[rank] = answer
        return [answers[rank] for rank in sorted(answers)]

    def _fail(self, message: str) -> None:
        self._kill()
        self.close()
        raise WorldError(f"{self.name}: {message}")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def stop_server() -> None:
    """End the process that worlds are forked from, once a script has closed its worlds.

    Left alone it would outlive the script by the seconds that an interpreter full of torch takes to
    end, with the script's output still open, so that whoever reads it would wait too. It holds
    nothing but imports, so it is killed.
    """
    server: Any = forkserver._forkserver  # there is no public way
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # waits for it


def _serve(
    pipe: Connection,
    meeting: tuple[Host | None, str, int],
    group: dict[str, Any],
    device: str,
    variables: Mapping[str, str],
    factory: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """Be one rank: make the worker, then answer calls until the parent says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.update(variables)  # a fork has those of its server
    torch.set_num_threads(1)
    host, address, port = meeting
    try:
        if host is not None:
            host.enter()
        serves = host is not None and group["rank"] == 0
        store = TCPStore(address, port, is_master=serves, wait_for_workers=False)
        if device == "cuda":
            take_gpu(group["rank"], group["world_size"])
        dist.init_process_group(store=store, **group)
        worker = factory(*args)
        pipe.send((True, None))
        while (request := pipe.recv()) is not None:
            method, arguments = request
            pipe.send((True, getattr(worker, method)(*arguments)))
        dist.destroy_process_group()
    except EOFError:  # the parent is gone
        return
    except BaseException:  # whatever it was, the parent must know
        with contextlib.suppress(BrokenPipeError):
            pipe.send((False, traceback.format_exc()))
