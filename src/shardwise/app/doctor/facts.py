"""The facts about one host, as plain values that are sent as JSON."""

from __future__ import annotations

import os
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwise.app.doctor.measure import PairLink, measure_shared_memory
from shardwise.app.doctor.probe import Probe, probe_rank
from shardwise.base.errors import CheckpointError
from shardwise.checkpoint.disk.strict import Fields, check_text, refuse
from shardwise.elastic.hosts import Nodes
from shardwise.elastic.network import address_towards, addresses, interface_of, listening

_VERSIONS = ("python", "torch", "shardwise")
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MOST = 10**6  # of hosts, and of ranks of one
_MOST_ADDRESSES = 4096  # of an interface
_REPORT = 2**16  # bytes that a report may have
_CGROUPS = Path("/sys/fs/cgroup")


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
        probe: a process that was started as a rank is.
        files: how many files a process may have open.
        tasks: how many more processes and threads may be started; -1 if nothing limits them.
        temporary: why the temporary folder cannot be written to; empty if it can.
        temporary_free: bytes free in it.
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
    localhost: str = ""
    probe: Probe = field(default_factory=Probe)
    files: int = 0
    tasks: int = -1
    temporary: str = ""
    temporary_free: int = 0
    memory: PairLink = field(default_factory=PairLink)
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

        A host with another version of Shardwise may send other facts, and anyone who can reach the
        port may send anything.
        """
        try:
            return _read(Fields(values, "facts"))
        except CheckpointError:
            return None


def _read(fields_: Fields) -> Facts:
    if fields_.all().keys() != {field.name for field in fields(Facts)}:
        refuse(fields_.where, list(fields_.all()), "the fields of this version")
    memory = PairLink.from_json(fields_.any("memory"))
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
        localhost=fields_.text("localhost"),
        probe=Probe.from_json(fields_.any("probe")),
        files=fields_.number("files", least=-1),
        tasks=fields_.number("tasks", least=-1),
        temporary=fields_.text("temporary"),
        temporary_free=fields_.number("temporary_free"),
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
        probe=probe_rank(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        tasks=_tasks(),
        temporary=temporary,
        temporary_free=temporary_free,
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
        found = os.statvfs(tempfile.gettempdir())
    except OSError as error:
        return error.strerror or str(error), 0
    return "", found.f_bavail * found.f_frsize


def _tasks() -> int:
    """Return how many more processes and threads may be started here; -1: nothing limits them.

    Two limits count both: that of the user (``ulimit -u``, which root is free of), and those of
    the control groups around this process, as of a container (``docker run --pids-limit``).
    """
    left = list(_tasks_of_groups())
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        left.append(most - _tasks_of_user(os.getuid()))
    return max(0, min(left)) if left else -1


def _tasks_of_user(user: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
        except OSError:  # it has ended
            continue
    return count


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
        found = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize
