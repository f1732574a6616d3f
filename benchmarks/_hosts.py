"""Hosts made of namespaces on one machine, and a link between them, of a chosen speed or as it is.

    host 0  10.77.0.1 eth0 ──veth, tbf at each end── eth0 10.77.0.2  host 1

Three hosts and more have such a link to a switch each: a bridge in a namespace of its own.

A host has a network, mounts and inter-process memory of its own, so that only its own ranks share
memory; files are the same. A process, ``sleep``, holds them. Any number of networks may exist at
once: addresses and ports never meet. Needs root and Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: In the order in which a process enters: mounts last, as they hide what describes the others.
_NAMESPACES = ("net", "ipc", "mnt")


class HostsError(RuntimeError):
    """A command that makes hosts, or changes them, failed; the message has it and what it said."""


@dataclass(frozen=True)
class Host:
    """One end of a link.

    Attributes:
        name: of the network namespace.
        address: of its end of the link, ``eth0``.
        pid: of the process that holds its namespaces.
        cores: the processors of ranks that enter it; if there are enough, no others have them.
    """

    name: str
    address: str
    pid: int
    cores: frozenset[int]

    def enter(self) -> None:
        """Move this process, which must have one thread only, to the host.

        Raises:
            OSError: the kernel refuses.
        """
        folder = Path.cwd()
        libc = ctypes.CDLL(None, use_errno=True)
        handles = [os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY) for kind in _NAMESPACES]
        for kind, handle in zip(_NAMESPACES, handles, strict=True):
            if libc.setns(handle, 0):
                error = ctypes.get_errno()
                raise OSError(error, f"{self.name}: setns({kind}): {os.strerror(error)}")
            os.close(handle)
        os.chdir(folder)  # a mount namespace begins at its root
        os.sched_setaffinity(0, self.cores)

    def wrap(self, command: Sequence[str], folder: Path) -> list[str]:
        """Return what runs a command on the host, as the very process that is started.

        It may run on all processors.

        Args:
            command: program and arguments.
            folder: where it runs.
        """
        inside = ["nsenter", "--target", str(self.pid), "--net", "--ipc", "--mount"]
        return [*inside, "env", f"--chdir={folder.resolve()}", *command]

    def running(self) -> list[int]:
        """Return the processes that run on the host, without the one that holds it."""
        pids = map(int, run("ip", "netns", "pids", self.name).split())
        return [pid for pid in pids if pid != self.pid]

    def sent(self) -> int:
        """Return the bytes that have left through ``eth0``, headers included, as it counts them."""
        view = Path(f"/proc/{self.pid}/root/sys/class/net/eth0/statistics/tx_bytes")
        return int(view.read_text())

    def ip(self, *arguments: str) -> None:
        """Run ``ip`` in the host's network.

        Raises:
            HostsError: it failed.
        """
        run("ip", "-n", self.name, *arguments)

    def shape(self, gbit: float) -> None:
        """Let ``eth0`` send no faster: a token bucket of 1 ms, and a queue of 50 ms.

        Raises:
            HostsError: it is shaped already.
        """
        burst = max(128 * 1024, int(gbit * 1e9 / 8 / 1000))
        limits = ("rate", f"{gbit * 1e6:.0f}kbit", "burst", f"{burst}b", "latency", "50ms")
        run("tc", "-n", self.name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)


@contextlib.contextmanager
def two_hosts(gbit: float | None = None) -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a link between them; what still runs on them at the end is killed.

    Args:
        gbit: speed of the link in each direction, in Gbit/s; None: what the machine can do.

    Raises:
        HostsError: the machine does not let this process make them.
    """
    with contextlib.ExitStack() as stack:
        first, second = (_namespace(stack) for _ in range(2))
        ends = ("name", "eth0", "netns", first), ("name", "eth0", "netns", second)
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        hosts = _hosts(stack, [first, second], gbit)
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def switched_hosts(count: int, gbit: float | None = None) -> Iterator[tuple[Host, ...]]:
    """Make hosts that are joined by a switch, as :func:`two_hosts` makes two.

    Args:
        count: of hosts.
        gbit: speed at which each host sends, in Gbit/s; None: what the machine can do.

    Raises:
        HostsError: the machine does not let this process make them.
    """
    with contextlib.ExitStack() as stack:
        switch = _namespace(stack)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        names = [_namespace(stack) for _ in range(count)]
        for i, name in enumerate(names):
            ends = ("name", "eth0", "netns", name), ("name", f"port{i}", "netns", switch)
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            run("ip", "-n", switch, "link", "set", f"port{i}", "master", "br0", "up")
        yield _hosts(stack, names, gbit)


def _namespace(stack: contextlib.ExitStack) -> str:
    """Make a network namespace that is deleted when the stack is left; return its name."""
    name = f"shardwise-{secrets.token_hex(4)}"
    run("ip", "netns", "add", name)
    stack.callback(run, "ip", "netns", "delete", name)
    return name


def _hosts(stack: contextlib.ExitStack, names: list[str], gbit: float | None) -> tuple[Host, ...]:
    """Make hosts of network namespaces that have an ``eth0``."""
    every = sorted(os.sched_getaffinity(0))
    hosts = []
    for i, name in enumerate(names):
        holder = stack.enter_context(_holder(name))
        cores = frozenset(every[i :: len(names)] or every)
        host = Host(name, f"10.77.0.{i + 1}", holder, cores)
        host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.ip("link", "set", device, "up")
        if gbit is not None:
            host.shape(gbit)
        stack.callback(_kill_all, host)
        hosts.append(host)
    return tuple(hosts)


@contextlib.contextmanager
def _holder(name: str) -> Iterator[int]:
    """Start the process that holds a host's namespaces; yield its pid."""
    command = ["ip", "netns", "exec", name, "unshare", "--ipc", "--mount", "sleep", "infinity"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        for _ in range(1000):  # each of the commands becomes the next one
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep":
                break
            time.sleep(0.01)
        else:
            raise HostsError(f"{name}: its namespaces were not made within 10 s")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _kill_all(host: Host) -> None:
    for pid in host.running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(*command: str) -> str:
    """Run a command; return what it printed.

    Raises:
        HostsError: it is not there, or failed.
    """
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise HostsError(f"{' '.join(command)}: {said.strip()} (hosts need root)") from error
    return done.stdout
