"""Hosts made of namespaces on one machine, and a link between them of a chosen speed.

    host 0  10.78.0.1 eth0 ──veth, tbf at each end── eth0 10.78.0.2  host 1

A host has a network, mounts and inter-process memory of its own, so that only its own ranks share
memory; files are the same. A process, ``sleep``, holds them. Needs root and Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: In the order in which a process enters: mounts last, as they hide what describes the others.
_NAMESPACES = ("net", "ipc", "mnt")


@dataclass(frozen=True)
class Host:
    """One side of the link.

    Attributes:
        name: of the network namespace.
        address: of its end of the link, ``eth0``.
        pid: of the process that holds its namespaces.
        cores: the processors that its ranks run on, and no other host's.
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

    def sent(self) -> int:
        """Return the bytes that have left through ``eth0``, headers included, as it counts them."""
        view = Path(f"/proc/{self.pid}/root/sys/class/net/eth0/statistics/tx_bytes")
        return int(view.read_text())


@contextlib.contextmanager
def two_hosts(gbit: float) -> Iterator[tuple[Host, Host]]:
    """Make two hosts; their ranks have to end before they do.

    Args:
        gbit: speed of the link in each direction, in Gbit/s.

    Raises:
        RuntimeError: the machine does not let this process make them.
    """
    names = [f"shardwise-bench-{os.getpid()}-{i}" for i in range(2)]
    every = sorted(os.sched_getaffinity(0))
    cores = [frozenset(every[i::2] or every) for i in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        ends = [("name", "eth0", "netns", name) for name in names]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        hosts = []
        for i, name in enumerate(names):
            address = f"10.78.0.{i + 1}"
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _shape(name, gbit)
            holder = stack.enter_context(_holder(name))
            hosts.append(Host(name, address, holder, cores[i]))
        yield hosts[0], hosts[1]


def _shape(name: str, gbit: float) -> None:
    """Let ``eth0`` send no faster: a token bucket of 1 ms, and a queue of 50 ms."""
    burst = max(128 * 1024, int(gbit * 1e9 / 8 / 1000))
    limits = ("rate", f"{gbit * 1e6:.0f}kbit", "burst", f"{burst}b", "latency", "50ms")
    inside = ("ip", "netns", "exec", name)
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)


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
            raise RuntimeError(f"{name}: its namespaces were not made within 10 s")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise RuntimeError(f"{' '.join(command)}: {said.strip()} (this needs root)") from error
