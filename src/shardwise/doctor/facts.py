"""What a host says of itself, as plain values that travel as JSON."""

from __future__ import annotations

import os
import platform
import resource
import socket
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from shardwise.doctor.memory import Memory, measure_memory
from shardwise.launch.addresses import addresses, interface_of, own_address
from shardwise.launch.hosts import Nodes

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
        interfaces: addresses by name of each network interface.
        address: its own, from which it sends to host 0; empty where there is no way.
        towards: the interface that has this address.
        resolved: the first address that its own name has, or what went wrong.
        settings: environment variables that choose an interface.
        files: how many files a process may have open.
        memory: how its ranks can share memory.
        shm_free: bytes free in ``/dev/shm``; -1 where there is none.
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
    files: int = 0
    memory: Memory = field(default_factory=Memory)
    shm_free: int = -1

    @property
    def who(self) -> str:
        """For people."""
        return f"host {self.rank} ({self.name})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Facts:
        """Read back what :meth:`to_json` made."""
        return Facts(**{**values, "memory": Memory(**values["memory"])})


def look(nodes: Nodes, nproc: int) -> Facts:
    """Look at this host."""
    name = platform.node()
    address = _address(nodes.address)
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
        address=address,
        towards=interface_of(address),
        resolved=_resolve(name),
        settings={key: os.environ[key] for key in _SETTINGS if key in os.environ},
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        memory=measure_memory(),
        shm_free=_shm_free(),
    )


def _address(towards: str) -> str:
    try:
        return own_address(towards)
    except OSError:
        return ""


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return f"unknown ({error.strerror or error})"


def _shm_free() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize
