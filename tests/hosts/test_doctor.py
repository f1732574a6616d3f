"""What ``shardwise doctor`` finds between hosts, with every fault provoked.

A diagnosis is a process on each host; one diagnosis covers several faults that do not hide each
other.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks._hosts import Host, run, two_hosts
from tests.doctor.test_diagnose import documented_checks
from tests.hosts.network import needs_hosts, start
from tests.programs import Program

pytestmark = needs_hosts

PORT = 29411
WAIT = 120.0  # seconds that anything may take on a busy machine
TOKEN = {"SHARDWISE_RDZV_TOKEN": "the token of this job"}
Pair = tuple[Host, Host]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with two_hosts() as pair:
        yield pair


@dataclass(frozen=True)
class Verdicts:
    """What one host printed."""

    code: int
    lines: list[str]

    def of(self, check: str, level: str) -> list[str]:
        """Return the lines of a check with a level."""
        head = f"{level:<5}{check:<12}"
        return [line[len(head) :] for line in self.lines if line.startswith(head)]

    @property
    def checks(self) -> set[str]:
        """The checks with at least one line."""
        return {line[5:17].strip() for line in self.lines}


@dataclass
class Guest:
    """A host to diagnose: its options, and what is wrong in its processes."""

    host: Host
    rank: int
    nnodes: int = 2
    nproc: int = 1
    rdzv: str = f"10.77.0.1:{PORT}"
    env: dict[str, str] | None = None

    def begin(self, timeout: float) -> Program:
        options = f"--nnodes {self.nnodes} --node-rank {self.rank} --rdzv {self.rdzv}"
        more = f"--nproc {self.nproc} --timeout {timeout} --least-gbit 0.2"
        arguments = ["doctor", *options.split(), *more.split()]
        return start(self.host, "shardwise", *arguments, env=self.env)


def diagnose(*guests: Guest, timeout: float = 60) -> list[Verdicts]:
    processes = [guest.begin(timeout) for guest in guests]
    verdicts = []
    for process in processes:
        out, err = process.communicate(timeout=WAIT)
        assert err == "", err
        verdicts.append(Verdicts(process.returncode, out.splitlines()))
    return verdicts


def spoilt(folder: Path, code: str = "", **versions: str) -> dict[str, str]:
    """Return an environment in which Python runs code first, or finds other versions installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.fixture
def idle(tmp_path: Path) -> dict[str, str]:
    """An environment for tests of what hosts tell each other: no rank is started to measure."""
    code = "from shardwise.app.doctor import probe\nprobe.probe_ranks = probe.Probe"
    return spoilt(tmp_path / "idle", code)


@contextlib.contextmanager
def rule(host: Host, *words: str) -> Iterator[None]:
    """Add a network rule to a host for a while."""
    host.ip(*words[:1], "add", *words[1:])
    try:
        yield
    finally:
        host.ip(*words[:1], "del", *words[1:])


@contextlib.contextmanager
def slowed(host: Host, gbit: float) -> Iterator[None]:
    """Limit the bandwidth of a host."""
    host.shape(gbit)
    try:
        yield
    finally:
        run("tc", "-n", host.name, "qdisc", "del", "dev", "eth0", "root")


def test_healthy_hosts_pass_every_check_and_report_the_same(hosts: Pair) -> None:
    first, second = diagnose(*(Guest(host, at, env=TOKEN) for at, host in enumerate(hosts)))
    assert (first.code, second.code) == (0, 0), first.lines
    assert first.lines == second.lines
    assert all(line.startswith("ok") for line in first.lines), first.lines
    assert first.checks == set(documented_checks())
    assert first.of("rendezvous", "ok") == ["found 2 hosts, all with the token"]
    assert len(first.of("links", "ok")) == 2
    assert len(first.of("inside", "ok")) == 2
    assert "Gbit/s" in first.of("links", "ok")[0]


def test_what_is_wrong_on_one_host_is_reported_on_all(hosts: Pair, tmp_path: Path) -> None:
    wrong = """
        import resource, time
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        right = time.time
        time.time = lambda: right() + 90
        from shardwise.base import devices
        devices.models = lambda: [("a card", 2**30)] * 4
        devices.versions = lambda: {"driver": "1.2.3", "NCCL": "2.27.5"}
    """
    env = spoilt(tmp_path / "spoilt", wrong, torch="9.9.9", shardwise="8.8.8")
    env["NCCL_SOCKET_IFNAME"] = "eth7"
    env["GLOO_SOCKET_IFNAME"] = "lo"
    with slowed(hosts[1], 0.02):
        told = diagnose(Guest(hosts[0], 0), Guest(hosts[1], 1, nproc=2, env=env))
    for each in told:
        assert each.code == 1
        assert "1 on host 0" in (world := " ".join(each.of("world size", "fail"))), each.lines
        assert "2 x 2 on host 1" in world
        versions = " ".join(each.of("versions", "fail"))
        assert "9.9.9 on host 1" in versions
        assert "8.8.8 on host 1" in versions
        assert "no accelerators on host 0" in (cards := " ".join(each.of("devices", "warn")))
        assert "4 x a card (1.0 GiB) on host 1" in cards
        assert "driver is missing on host 0" in cards
        assert "2.27.5 on host 1" in " ".join(each.of("devices", "fail"))
        assert "host 1" in (clock := " ".join(each.of("clocks", "warn")))
        assert "90.0 s ahead of host 0" in clock
        assert "NCCL_SOCKET_IFNAME=eth7" in " ".join(each.of("interfaces", "fail"))
        gloo = " ".join(each.of("interfaces", "warn"))
        assert "gloo would use lo" in gloo
        assert "export GLOO_SOCKET_IFNAME=eth0" in gloo
        assert "100 open files" in " ".join(each.of("limits", "fail"))
        assert "files, and so shared memory, are limited to 1 MiB" in " ".join(
            each.of("limits", "warn")
        )
        slow = [way for way in each.of("links", "warn") if way.startswith("host 1")]
        assert "expected 0.2 Gbit/s; train with --strategy hybrid" in slow[0]


def test_ports_that_are_blocked_are_found_and_nothing_hangs(
    hosts: Pair, idle: dict[str, str]
) -> None:
    blocked = ["rule", "to", "10.77.0.1", "ipproto", "tcp", "dport", "30000-65534", "prohibit"]
    with rule(hosts[1], *blocked):
        told = diagnose(Guest(hosts[0], 0, env=idle), Guest(hosts[1], 1, env=idle))
    for each in told:
        assert each.code == 1
        ways = each.of("ports", "fail")
        assert [way.split(" cannot connect to ")[0][:6] for way in ways] == ["host 0", "host 1"]
        assert "allow all TCP ports between the hosts" in ways[0]


def test_a_rendezvous_that_fails_is_explained_on_each_host(
    hosts: Pair, idle: dict[str, str]
) -> None:
    other = f"10.77.0.2:{PORT}"
    refused, own, away, alone = diagnose(
        Guest(hosts[1], 1, env=idle),  # nothing listens
        Guest(hosts[1], 1, rdzv=other, env=idle),  # its own address
        Guest(hosts[1], 1, rdzv=f"10.99.0.1:{PORT}", env=idle),  # no route leads there
        Guest(hosts[0], 0, rdzv=other, env=idle),  # not an address of host 0
        timeout=1,
    )
    messages = [" ".join(each.of("rendezvous", "fail")) for each in (refused, own, away, alone)]
    assert "the host is up, but nothing listens" in messages[0]
    assert "this is the address of this host, whose rank is 1" in messages[1]
    assert "no route leads there" in messages[2]
    assert "cannot listen at 10.77.0.2" in messages[3]
    assert "10.77.0.1 on eth0" in messages[3]
    assert [each.code for each in (refused, own, away, alone)] == [1] * 4
    # A route that drops what is sent is as good as none: it is given up after --timeout.
    with rule(hosts[1], "route", "blackhole", "10.77.0.1/32"):
        [swallowed] = diagnose(Guest(hosts[1], 1, env=idle), timeout=1)
    assert swallowed.code == 1
    assert "cannot be reached from here" in swallowed.of("rendezvous", "fail")[0]
    assert swallowed.of("interfaces", "fail"), "no interface leads there"
