"""What a host says of itself, as plain values that travel as JSON."""

from __future__ import annotations

import os
import platform
import resource
import socket
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from shardwise.launch.hosts import Nodes, addresses, interface_towards

_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Facts:
    """One host.

    Attributes:
        rank: its number, as it was told.
        nnodes: hosts of the job, as it was told.
        nproc: ranks on it.
        name: its host name.
        versions: of what has to be the same everywhere.
        interfaces: address by name of each network interface.
        towards: the interface on the way to host 0.
        resolved: the address that its own name has, or what went wrong.
        settings: environment variables that choose an interface.
        files: how many files a process may have open.
        memory: what went wrong with shared memory; empty where it works.
        shm_free: bytes free in ``/dev/shm``; -1 where there is none.
    """

    rank: int
    nnodes: int
    nproc: int
    name: str
    versions: dict[str, str]
    interfaces: dict[str, str]
    towards: str | None
    resolved: str
    settings: dict[str, str] = field(default_factory=dict)
    files: int = 0
    memory: str = ""
    shm_free: int = -1

    @property
    def who(self) -> str:
        """For people."""
        return f"host {self.rank} ({self.name})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def look(nodes: Nodes, nproc: int) -> Facts:
    """Look at this host."""
    name = platform.node()
    return Facts(
        rank=nodes.rank,
        nnodes=nodes.count,
        nproc=nproc,
        name=name,
        versions={
            "python": ".".join(platform.python_version_tuple()[:2]),
            **{package: metadata.version(package) for package in ("torch", "shardwise")},
        },
        interfaces=addresses(),
        towards=interface_towards(nodes.address),
        resolved=_resolve(name),
        settings={key: os.environ[key] for key in _SETTINGS if key in os.environ},
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=_try_shared_memory(),
        shm_free=_shm_free(),
    )


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 1, family=socket.AF_INET)[0][4][0])
    except OSError as error:
        return f"unknown ({error.strerror or error})"


def _try_shared_memory() -> str:
    """What is wrong with anonymous shared memory of 16 MiB."""
    size = 16 * 2**20
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < 2**40:
        return f"files may grow to {limit / 2**20:,.0f} MiB only (ulimit -f), shared memory too"
    try:
        handle = os.memfd_create("shardwise-doctor")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(handle, size)
        os.pwrite(handle, b"1", size - 1)
    except OSError as error:
        return f"16 MiB of it: {error.strerror}"
    finally:
        os.close(handle)
    return ""


def _shm_free() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize
