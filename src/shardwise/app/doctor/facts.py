"""The facts about one host, as plain values that are sent as JSON."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from shardwise.app.doctor.probe import Probe
from shardwise.base import plain
from shardwise.elastic.hosts import Nodes
from shardwise.elastic.network import address_towards, addresses, interface_of, listening

_VERSIONS = ("python", "torch", "shardwise")
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST = 10**6  # of hosts, and of ranks of one
_REPORT = 2**16  # bytes that a report may have
_CGROUPS = Path("/sys/fs/cgroup")
T = TypeVar("T")


def received(kind: type[T], values: Any) -> T | None:
    """Read what another host has sent; None if it is something else.

    A host with another version of Shardwise may send other facts, and anyone who can reach the port
    may send anything.
    """
    try:
        return plain.converted(kind, values)
    except ValueError:
        return None


@dataclass(frozen=True)
class Facts:
    """The facts about one host.

    Attributes:
        rank: its ``--node-rank``.
        nnodes: its ``--nnodes``.
        nproc: ranks on it.
        name: its host name.
        versions: of what has to be the same everywhere.
        interfaces: the addresses of each network interface, by name.
        address: the one from which it sends to host 0; empty if no route leads there.
        towards: the interface that has this address.
        resolved: the first address that its own name resolves to, or what went wrong.
        settings: environment variables that choose an interface.
        localhost: why no port of ``localhost`` can be taken; empty if one can.
        probe: two processes that were started as ranks are.
        files: how many files a process may have open.
        tasks: how many more processes and threads may be started; -1 if nothing limits them.
        temporary: why the temporary folder cannot be written to; empty if it can.
        temporary_free: bytes free in it.
        shm_free: bytes free in ``/dev/shm``; -1 if there is none.
    """

    rank: int
    nnodes: int
    nproc: int
    name: str
    versions: dict[str, str]
    interfaces: dict[str, list[str]]
    address: str
    towards: str | None
    resolved: str
    settings: dict[str, str] = field(default_factory=dict)
    localhost: str = ""
    probe: Probe = field(default_factory=Probe)
    files: int = 0
    tasks: int = -1
    temporary: str = ""
    temporary_free: int = 0
    shm_free: int = -1

    @property
    def label(self) -> str:
        """The host, for messages."""
        return f"host {self.rank} ({self.name})"

    def __post_init__(self) -> None:
        numbers = (self.rank, self.nnodes - 1, self.nproc - 1)
        if not all(0 <= number <= _MOST for number in numbers):
            raise ValueError("found an impossible number of hosts or ranks")
        if min(self.files, self.tasks, self.shm_free) < -1 or self.temporary_free < 0:
            raise ValueError("found a limit below -1, expected none or a number")
        if not (self.versions.keys() <= {*_VERSIONS} and self.settings.keys() <= {*_SETTINGS}):
            raise ValueError(f"found names other than {_VERSIONS} and {_SETTINGS}")


def collect_facts(nodes: Nodes, nproc: int, probe: Probe) -> Facts:
    """Collect the facts about this host, beside what ranks on it have found."""
    name = platform.node()
    address = _address(nodes.address)
    temporary, temporary_free = _temporary()
    return Facts(
        rank=nodes.rank,
        nnodes=nodes.count,
        nproc=nproc,
        name=name,
        versions={
            "python": ".".join(platform.python_version_tuple()[:2]),
            **{package: metadata.version(package) for package in _VERSIONS[1:]},
        },
        interfaces=addresses(),
        address=address,
        towards=interface_of(address),
        resolved=_resolve(name),
        settings={key: os.environ[key] for key in _SETTINGS if key in os.environ},
        localhost=_localhost(),
        probe=probe,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        tasks=_tasks(),
        temporary=temporary,
        temporary_free=temporary_free,
        shm_free=_shm_free(),
    )


def _address(towards: str) -> str:
    try:
        return address_towards(towards)
    except OSError:
        return ""


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return f"unknown ({error.strerror or error})"


def _localhost() -> str:
    """Take a port of ``localhost``, as torchrun does for the store of the ranks."""
    try:
        listening("localhost").close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _temporary() -> tuple[str, int]:
    """Write to the temporary folder; return why that is impossible, and the bytes free in it."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(bytes(_REPORT))
        return "", shutil.disk_usage(tempfile.gettempdir()).free
    except OSError as error:
        return error.strerror or str(error), 0


def _tasks() -> int:
    """Return how many more processes and threads may be started here; -1: nothing limits them.

    Two limits count both: that of the user (``ulimit -u``, which root is free of), and those of
    the control groups around this process, as of a container (``docker run --pids-limit``).
    """
    left = list(_tasks_of_groups())
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        every = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
        # Where the system does not say it of a process of others, psutil gives None.
        own = [each for each in every if each["uids"] and each["uids"].real == os.getuid()]
        left.append(most - sum(each["num_threads"] or 0 for each in own))
    return max(0, min(left)) if left else -1


def _tasks_of_groups() -> Iterator[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):  # version 2, or version 1 with a tree for each
            continue
        group = _CGROUPS / controllers / path.strip("/")
        while group != _CGROUPS.parent:
            try:
                most = (group / "pids.max").read_text().strip()
                if most != "max":
                    yield int(most) - int((group / "pids.current").read_text())
            except (OSError, ValueError):  # the root of a tree has no limit
                pass
            group = group.parent


def _shm_free() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return -1
