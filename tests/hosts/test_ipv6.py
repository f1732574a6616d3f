"""Hosts with IPv6 addresses only: a job and the doctor run, and errors name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks._hosts import Host, run, two_hosts
from tests.hosts.network import needs_hosts, start
from tests.programs import Program

pytestmark = needs_hosts

ADDRESSES = ("fd77::1", "fd77::2")
NAME = "host-a.test"  # which only IPv6 knows
WAIT = 60.0

RANK = """
import os
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

def body(world, signals):
    told = [os.environ[name] for name in ("MASTER_ADDR", "NCCL_SOCKET_IFNAME")]
    print(f"rank {world.rank} of {world.size}", *told, flush=True)

run_rank(find_world(), body)
"""

JOB = """
import sys
from shardwise.elastic import restarts
from shardwise.elastic.hosts import Nodes

script, rdzv, rank = sys.argv[1:]
nodes = Nodes.of(2, int(rank), rdzv, 30.0)
sys.exit(restarts.run_job(lambda attempt: [sys.executable, script], 1, 0, nodes))
"""

Pair = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    names = tmp_path_factory.mktemp("names") / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {NAME}\n")
    with two_hosts() as pair:
        for host, address in zip(pair, ADDRESSES, strict=True):
            host.ip("addr", "flush", "dev", "eth0")
            # "nodad": it may be used at once, without asking first whether anyone has it.
            host.ip("addr", "add", f"{address}/64", "dev", "eth0", "nodad")
            run(*host.wrap(["mount", "--bind", str(names), "/etc/hosts"], names.parent))
        yield pair


def ended(*processes: Program) -> list[tuple[int, str, str]]:
    """Return exit code, standard output and standard error of each."""
    said = [process.communicate(timeout=WAIT) for process in processes]
    return [(p.returncode, *each) for p, each in zip(processes, said, strict=True)]


@pytest.mark.parametrize("where", [f"[{ADDRESSES[0]}]:29413", f"{NAME}:29413"])
def test_a_job_starts(hosts: Pair, tmp_path: Path, where: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "job.py").write_text(JOB)
    command = ["job", str(tmp_path / "rank.py"), where]
    env = {"PYTHONPATH": str(tmp_path)}
    found = ended(*(start(h, *command, str(r), env=env) for r, h in enumerate(hosts)))
    address = where.rpartition(":")[0].strip("[]")
    assert [(code, err) for code, _, err in found] == [(0, ""), (0, "")]
    assert found[0][1] == f"rank 0 of 2 {address} eth0\n"


def diagnose(hosts: Sequence[Host], *wheres: str) -> list[tuple[int, str, str]]:
    """Run the doctor on hosts, each with its own ``--rdzv``."""
    processes = []
    for rank, (host, where) in enumerate(zip(hosts, wheres, strict=True)):
        options = f"doctor --nnodes 2 --node-rank {rank} --rdzv {where} --timeout 5"
        processes.append(start(host, "shardwise", *options.split()))
    return ended(*processes)


def test_the_doctor_passes_healthy_hosts(hosts: Pair) -> None:
    for code, out, err in diagnose(hosts, f"{NAME}:29414", f"{NAME}:29414"):
        assert (code, err) == (0, ""), out
        assert "ok   ports       2 connections between hosts work" in out
        assert out.count("ok   links") + out.count("warn links") == 2, out
        assert "eth0 on host 0" in out
        assert "eth0 on host 1" in out


def test_the_doctor_tells_what_is_wrong(hosts: Pair) -> None:
    listens, reaches = diagnose(hosts, "[fd77::9]:29415", "10.77.0.1:29415")
    assert (listens[0], reaches[0]) == (1, 1)
    assert "host 0 cannot listen at [fd77::9]:29415" in listens[1]
    assert "fd77::1 on eth0" in listens[1]
    assert "10.77.0.1:29415 cannot be reached" in reaches[1]
    [(code, _, err)] = diagnose(hosts[:1], "fd77::1:29415")
    assert code == 2
    assert "an IPv6 address in brackets, as [2001:db8::1]:29400" in err
