"""What a host says of itself, as plain values that travel as JSON."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any

from shardwise.checkpoint.disk.strict import Fields, check_text, refuse
from shardwise.doctor.measure import Memory, measure_memory
from shardwise.errors import CheckpointError
from shardwise.launch.hosts import Nodes
from shardwise.launch.network import address_towards, addresses, interface_of

_VERSIONS = ("python", "torch", "shardwise")
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST = 10**6  # of hosts, and of ranks of one
_MOST_ADDRESSES = 4096  # of an interface


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
    def from_json(values: Any) -> Facts | None:
        """Read back what :meth:`to_json` made; None where something else came.

        A host with another version of Shardwise may say other things of itself, and whoever can
        reach the port may say anything.
        """
        try:
            return _facts(Fields(values, "facts"))
        except CheckpointError:
            return None


def _facts(said: Fields) -> Facts:
    if said.all().keys() != {field.name for field in fields(Facts)}:
        refuse(said.where, list(said.all()), "the fields of this version")
    memory = Fields(said.any("memory"), "memory")
    interfaces = Fields(said.any("interfaces"), "interfaces")
    return Facts(
        rank=said.number("rank", most=_MOST),
        nnodes=said.number("nnodes", least=1, most=_MOST),
        nproc=said.number("nproc", least=1, most=_MOST),
        name=said.text("name"),
        versions=_texts(said.any("versions"), _VERSIONS),
        interfaces={
            check_text(name, interfaces.where): [
                _text(each, name) for each in interfaces.items(name, _MOST_ADDRESSES)
            ]
            for name in interfaces.all()
        },
        address=said.text("address"),
        towards=None if said.any("towards") is None else said.text("towards"),
        resolved=said.text("resolved"),
        settings=_texts(said.any("settings"), _SETTINGS),
        files=said.number("files", least=-1),
        memory=Memory(memory.text("error"), memory.real("gbit"), memory.real("ms")),
        shm_free=said.number("shm_free", least=-1),
    )


def _text(said: Any, where: str) -> str:
    if not isinstance(said, str):
        refuse(where, said, "a string")
    return check_text(said, where)


def _texts(said: Any, known: Sequence[str]) -> dict[str, str]:
    """Texts by names, all of which are known."""
    texts = Fields(said, "texts")
    if not texts.all().keys() <= set(known):
        refuse(texts.where, list(texts.all()), f"only {', '.join(known)}")
    return {name: texts.text(name) for name in texts.all()}


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
            **{package: metadata.version(package) for package in _VERSIONS[1:]},
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
        return address_towards(towards)
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
