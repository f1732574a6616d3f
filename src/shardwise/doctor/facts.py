"""The facts about one host, as plain values that are sent as JSON."""

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
from shardwise.doctor.measure import Link, measure_shared_memory
from shardwise.errors import CheckpointError
from shardwise.launch.hosts import Nodes
from shardwise.launch.network import address_towards, addresses, interface_of

_VERSIONS = ("python", "torch", "shardwise")
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST = 10**6  # of hosts, and of ranks of one
_MOST_ADDRESSES = 4096  # of an interface


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
        files: how many files a process may have open.
        memory: shared memory between two of its processes.
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
    files: int = 0
    memory: Link = field(default_factory=Link)
    shm_free: int = -1

    @property
    def label(self) -> str:
        """The host, for messages."""
        return f"host {self.rank} ({self.name})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: Any) -> Facts | None:
        """Read what :meth:`to_json` returned; None if it is something else.

        A host with another version of Shardwise may send other facts, and whoever can reach the
        port may send anything.
        """
        try:
            return _read(Fields(values, "facts"))
        except CheckpointError:
            return None


def _read(fields_: Fields) -> Facts:
    if fields_.all().keys() != {field.name for field in fields(Facts)}:
        refuse(fields_.where, list(fields_.all()), "the fields of this version")
    memory = Link.from_json(fields_.any("memory"))
    if memory is None:
        refuse(fields_.where, fields_.any("memory"), "a measurement")
    interfaces = Fields(fields_.any("interfaces"), "interfaces")
    return Facts(
        rank=fields_.number("rank", most=_MOST),
        nnodes=fields_.number("nnodes", least=1, most=_MOST),
        nproc=fields_.number("nproc", least=1, most=_MOST),
        name=fields_.text("name"),
        versions=_texts(fields_.any("versions"), _VERSIONS),
        interfaces={
            check_text(name, interfaces.where): [
                _text(each, name) for each in interfaces.items(name, _MOST_ADDRESSES)
            ]
            for name in interfaces.all()
        },
        address=fields_.text("address"),
        towards=None if fields_.any("towards") is None else fields_.text("towards"),
        resolved=fields_.text("resolved"),
        settings=_texts(fields_.any("settings"), _SETTINGS),
        files=fields_.number("files", least=-1),
        memory=memory,
        shm_free=fields_.number("shm_free", least=-1),
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        refuse(where, value, "a string")
    return check_text(value, where)


def _texts(value: Any, known: Sequence[str]) -> dict[str, str]:
    """Read strings by name, all names being known."""
    texts = Fields(value, "texts")
    if not texts.all().keys() <= set(known):
        refuse(texts.where, list(texts.all()), f"only {', '.join(known)}")
    return {name: texts.text(name) for name in texts.all()}


def collect_facts(nodes: Nodes, nproc: int) -> Facts:
    """Collect the facts about this host."""
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
        memory=measure_shared_memory(),
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
