"""Hosts made of namespaces: apart, shaped as asked, and gone with what ran there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._hosts import Host, run, two_hosts
from tests.hosts.network import needs_hosts

pytestmark = needs_hosts

NAMESPACES = ("net", "ipc", "mnt")
HERE = Path(__file__).parent
SEND = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as out:
    out.sendto(bytes(1000), (sys.argv[1], 9))
"""


def place(pid: int | str) -> list[str]:
    return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES]


def on(host: Host, *command: str) -> str:
    return run(*host.wrap(command, HERE))


def test_pairs_are_apart_and_leave_nothing() -> None:
    with two_hosts() as first, two_hosts(gbit=0.5) as second:
        hosts = (*first, *second)
        assert len({host.name for host in hosts}) == 4
        places = [place(host.pid) for host in hosts]
        for kind in zip(*places, place("self"), strict=True):
            assert len(set(kind)) == 5
        shapes = [on(host, "tc", "qdisc", "show", "dev", "eth0") for host in hosts]
        assert [("tbf" in shape, "rate 500Mbit" in shape) for shape in shapes] == [
            *[(False, False)] * 2,
            *[(True, True)] * 2,
        ]
        sleeper = subprocess.Popen(first[1].wrap(["sleep", "infinity"], HERE))
        deadline = time.monotonic() + 10
        while place(sleeper.pid) != places[1]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [host.running() for host in hosts] == [[], [sleeper.pid], [], []]
    assert sleeper.wait(timeout=10) == -9
    left = run("ip", "netns", "list")
    assert not [host.name for host in hosts if host.name in left]


def test_a_command_runs_where_it_is_told_to() -> None:
    with two_hosts() as hosts:
        assert on(hosts[0], "pwd") == f"{HERE}\n"
        before = hosts[0].sent()
        on(hosts[0], sys.executable, "-c", SEND, hosts[1].address)
        assert 1000 < hosts[0].sent() - before < 2000
