"""Two hosts on one machine: network namespaces with addresses of their own, and a wire between."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def _can_make_hosts() -> bool:
    if os.geteuid() != 0:
        return False
    name = f"shardwise-probe-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


#: Marks tests that need hosts.
needs_hosts = pytest.mark.skipif(not _can_make_hosts(), reason="needs root and network namespaces")


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: of its end of the wire, ``eth0``.
    """

    name: str
    address: str

    def start(
        self, module: str, env: Mapping[str, str], *arguments: str, folder: Path = _ROOT
    ) -> subprocess.Popen[str]:
        """Start ``python -m module`` on this host, which shares no memory with another.

        Args:
            module: what to run.
            env: on top of this process's own.
            arguments: of the module.
            folder: where it runs.
        """
        # Network, mounts and inter-process memory are apart: only files are the same.
        apart = ["ip", "netns", "exec", self.name, "unshare", "--ipc", "--mount"]
        command = [*apart, sys.executable, "-m", module, *arguments]
        first = filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])
        paths = [*first, str(_ROOT / "src"), str(_ROOT)]
        return subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                **env,
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts; what still runs on them ends with them."""
    hosts = [Host(f"shardwise-{os.getpid()}-{i}", f"10.77.0.{i + 1}") for i in range(2)]
    try:
        for host in hosts:
            run_ip("netns", "add", host.name)
        ends = [("name", "eth0", "netns", host.name) for host in hosts]
        run_ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            run_ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run_ip("-n", host.name, "link", "set", device, "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            _end_all(host)
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def run_over(
    hosts: Sequence[Host], ranks_per_host: int, module: str, timeout: float = 90
) -> list[str]:
    """Run a module on every rank of a world over ``hosts``; return what each printed.

    The environment is the one that ``torchrun`` makes.
    """
    world_size = ranks_per_host * len(hosts)
    processes = [
        host.start(
            module,
            {
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


def run_ip(*arguments: str) -> None:
    """Run ``ip``, which must succeed."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _end_all(host: Host) -> None:
    found = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
    )
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
