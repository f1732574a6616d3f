"""Start commands under test on hosts that ``benchmarks/_hosts.py`` creates."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from benchmarks._hosts import Host, HostsError, two_hosts
from tests.programs import Program, start_program

_ROOT = Path(__file__).parents[2]


def _can_make_hosts() -> bool:
    try:
        with two_hosts():
            return True
    except HostsError:
        return False


#: Marks tests that need hosts.
needs_hosts = pytest.mark.skipif(not _can_make_hosts(), reason="needs root and network namespaces")


def start(
    host: Host,
    module: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    folder: Path = _ROOT,
    out: int | IO[str] = subprocess.PIPE,
    err: int | IO[str] = subprocess.PIPE,
) -> Program:
    """Start ``python -m module`` on a host.

    Args:
        host: where.
        module: what to run.
        arguments: of the module.
        env: on top of this process's own.
        folder: where it runs.
        out: standard output, as ``subprocess`` takes it.
        err: standard error.
    """
    env = env or {}
    first = filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
    paths = [*first, str(_ROOT / "src"), str(_ROOT)]
    return start_program(
        ["-m", module, *arguments],
        folder=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            **env,
            "PYTHONPATH": os.pathsep.join(paths),
        },
        out=out,
        err=err,
        enter=functools.partial(_enter, host),
    )


def _enter(host: Host) -> None:
    """Move this process to a host, with all processors."""
    every = os.sched_getaffinity(0)
    host.enter()
    os.sched_setaffinity(0, every)


def left_on(*hosts: Host) -> list[str]:
    """What still runs on hosts, once children of killed processes had time to end."""
    deadline = time.monotonic() + 10.0
    while True:
        running = [pid for host in hosts for pid in host.running()]
        if not running or time.monotonic() > deadline:
            return [_command_line(pid) for pid in running]
        time.sleep(0.02)


def _command_line(pid: int) -> str:
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {pid}, which has ended since"


def run_over(
    hosts: Sequence[Host], ranks_per_host: int, module: str, timeout: float = 90
) -> list[str]:
    """Run a module on every rank of a world over ``hosts``; return what each printed.

    The environment is the one that ``torchrun`` makes.
    """
    world_size = ranks_per_host * len(hosts)
    processes = [
        start(
            host,
            module,
            env={
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29510",
                "RANK": str(ranks_per_host * i + local),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "WORLD_SIZE": str(world_size),
            },
        )
        for i, host in enumerate(hosts)
        for local in range(ranks_per_host)
    ]
    printed = []
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{err}"
        printed.append(out)
    return printed
