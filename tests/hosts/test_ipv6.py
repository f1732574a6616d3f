"""Hosts that have IPv6 addresses only: they meet, are looked at, and what is wrong is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Host, needs_hosts, run_ip, two_hosts

pytestmark = needs_hosts

ROOT = Path(__file__).parents[2]
ADDRESSES = ("fd77::1", "fd77::2")
NAME = "host-a.test"  # which only IPv6 knows
WAIT = 60.0

RANK = """
import os
from shardwise.launch.rank import run_rank
from shardwise.launch.world import find_world

def body(world, signals):
    told = [os.environ[name] for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")]
    print(f"rank {world.rank} of {world.size}", *told, flush=True)

run_rank(find_world(), body)
"""

JOB = """
import sys
from shardwise.launch import restarts
from shardwise.launch.hosts import Nodes

script, rdzv, rank = sys.argv[1:]
nodes = Nodes.of(2, int(rank), rdzv, 30.0)
sys.exit(restarts.run_over_hosts(lambda attempt: [sys.executable, script], 1, nodes, 0))
"""

Pair = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with two_hosts() as pair:
        for host, address in zip(pair, ADDRESSES, strict=True):
            run_ip("-n", host.name, "addr", "flush", "dev", "eth0")
            # "nodad": it may be used at once, without asking first whether anyone has it.
            run_ip("-n", host.name, "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
        yield pair


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands in /etc/hosts of both hosts."""
    file = tmp_path_factory.mktemp("names") / "hosts"
    file.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {NAME}\n")
    return file


def start(host: Host, names: Path, *command: str, **env: str) -> subprocess.Popen[str]:
    """Start Python on a host."""
    paths = [str(ROOT / "src"), str(ROOT)]
    script = f'mount --bind {names} /etc/hosts && exec {sys.executable} "$@"'
    apart = ["ip", "netns", "exec", host.name, "unshare", "--mount", "sh", "-c", script, "sh"]
    return subprocess.Popen(
        [*apart, *command],
        env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each."""
    said = [process.communicate(timeout=WAIT) for process in processes]
    return [(p.returncode, *each) for p, each in zip(processes, said, strict=True)]


@pytest.mark.parametrize("where", [f"[{ADDRESSES[0]}]:29413", f"{NAME}:29413"])
def test_a_job_starts(hosts: Pair, names: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "job.py").write_text(JOB)
    command = [str(tmp_path / "job.py"), str(tmp_path / "rank.py"), where]
    found = ended(*(start(h, names, *command, str(r)) for r, h in enumerate(hosts)))
    address = where.rpartition(":")[0].strip("[]")
    assert [(code, err) for code, _, err in found] == [(0, ""), (0, "")]
    assert found[0][1] == f"rank 0 of 2 {address} eth0\n"


def visit(hosts: Pair, names: Path, *wheres: str) -> list[tuple[int, str, str]]:
    """The doctor on both hosts; with only one place to meet, each is told the same."""
    processes = []
    for rank, host in enumerate(hosts):
        options = f"--nnodes 2 --node-rank {rank} --rdzv {wheres[min(rank, len(wheres) - 1)]}"
        command = ["-m", "shardwise", "doctor", *options.split(), "--timeout", "5"]
        processes.append(start(host, names, *command, GLOO_SOCKET_IFNAME="eth0"))
    return ended(*processes)


def test_the_doctor_passes_healthy_hosts(hosts: Pair, names: Path) -> None:
    for code, out, err in visit(hosts, names, f"{NAME}:29414"):
        assert (code, err) == (0, ""), out
        assert "ok   ports       2 ways between hosts are open" in out
        assert out.count("ok   links") + out.count("warn links") == 2, out
        assert "eth0 on host 0" in out
        assert "eth0 on host 1" in out


def test_the_doctor_tells_what_is_wrong(hosts: Pair, names: Path) -> None:
    found = visit(hosts, names, "[fd77::9]:29415", "10.77.0.1:29415")
    assert [code for code, _, _ in found] == [1, 1]
    assert "host 0 cannot listen at [fd77::9]:29415" in found[0][1]
    assert "fd77::1 on eth0" in found[0][1]
    assert "10.77.0.1:29415 cannot be reached" in found[1][1]
    [(code, _, err)] = ended(
        start(
            hosts[0],
            names,
            "-m",
            "shardwise",
            "doctor",
            "--nnodes",
            "2",
            "--node-rank",
            "0",
            "--rdzv",
            "fd77::1:29415",
        )
    )
    assert code == 2
    assert "an IPv6 address in brackets, as [2001:db8::1]:29400" in err
