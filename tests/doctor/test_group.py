"""Whoever reaches the doctor's port can send anything: none of it steers a terminal or a socket."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardwise.doctor import group
from shardwise.doctor.checks import (
    Finding,
    Level,
    check_interfaces,
    check_ranks,
    check_versions,
    check_world,
    ok,
)
from shardwise.doctor.diagnose import diagnose
from shardwise.doctor.facts import Facts, collect_facts
from shardwise.doctor.group import HostGroup, RendezvousError
from shardwise.doctor.measure import Link
from shardwise.launch.hosts import Nodes
from shardwise.launch.network import connect

ESCAPES = "\x1b[2J\x1b]0;mine\x07\r\n\u202eok   ranks"
FACTS = collect_facts(Nodes(2, 1, "127.0.0.1", 1), 1)
NOT_LOCAL = "203.0.113.7"  # reserved for documentation


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_GRACE", 0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def unknown_peer(port: int, *lines: bytes) -> Iterator[None]:
    """Connect to host 0, send some lines, and stay until host 0 hangs up."""

    def talk() -> None:
        line = connect("127.0.0.1", port, 10.0)
        with contextlib.closing(line), socket.socket(fileno=os.dup(line.fileno())) as raw:
            raw.setblocking(True)
            with contextlib.suppress(OSError):
                raw.sendall(b"".join(each + b"\n" for each in lines))
                while raw.recv(65536):
                    pass

    thread = threading.Thread(target=talk)
    thread.start()
    yield
    thread.join()


@contextlib.contextmanager
def impostor(*answers: Any) -> Iterator[Nodes]:
    """Listen in place of host 0, and answer anything; yields the job of a host that connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as heard:
                for answer in answers:
                    heard.readline()
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                heard.readline()

        thread = threading.Thread(target=talk)
        thread.start()
        yield Nodes(4, 1, "127.0.0.1", listener.getsockname()[1], 5.0)
        thread.join()


def value(told: Any) -> bytes:
    return json.dumps({"value": told}).encode()


def check_lines(findings: list[Finding]) -> None:
    for line in map(str, findings):
        assert line.isprintable(), line
        assert len(line) < 2100


# ---- what is said ----


def test_a_diagnosis_shows_nothing_raw_and_connects_to_nobody_who_was_named() -> None:
    hostile = replace(
        FACTS,
        name=ESCAPES * 1000,
        versions=dict.fromkeys(FACTS.versions, ESCAPES),
        interfaces={ESCAPES + str(i): [ESCAPES] * 9 for i in range(99)},
        resolved=ESCAPES,
        towards="eth0; rm -rf ~",
        settings={"GLOO_SOCKET_IFNAME": ESCAPES},
        memory=replace(FACTS.memory, error=ESCAPES * 50),
    )
    port, said = free_port(), list[Finding]()
    with socket.create_server(("127.0.0.2", 0)) as trap:
        endpoint = ["127.0.0.2", trap.getsockname()[1]]
        lines = [value(hostile.to_json()), value(1e18), value(ESCAPES), value(endpoint)]
        lines += [value({"error": ESCAPES, "gbit": 1.0, "ms": 1e17})] * 2
        with unknown_peer(port, *lines):
            assert not diagnose(Nodes(2, 0, "127.0.0.1", port, 10.0), 1, 0.0, said.append)
        trap.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            trap.accept()
    check_lines(said)
    shown = "\n".join(map(str, said))
    assert "host 1 (\N{REPLACEMENT CHARACTER}[2J" in shown, "what was said is shown, but made safe"
    assert "export GLOO_SOCKET_IFNAME='eth0; rm -rf ~'" in shown
    assert all(len(line) < 2100 for line in shown.splitlines())


@pytest.mark.parametrize(
    "lines",
    [
        [b"GET / HTTP/1.1", b"Host: here"],
        [b"[" * 100_000],
        [b'{"value": ' + b"[" * 900 + b"]" * 900 + b"}"] * 3,
        [b"\xff\xfe\0"],
        [b"{}", b"{}"],
        [value(None), value("now"), value("here")],
        [value([]), value([1]), value([NOT_LOCAL, 22])],
        [value({"rank": 1}), value(float("nan")), value(-1)],
        [value(FACTS.to_json()), value(float("inf")), value(True)],
        [value(FACTS.to_json()), value(10**400), value(80)],
    ],
)
def test_whatever_a_peer_sends_host_0_continues(lines: list[bytes]) -> None:
    port = free_port()
    with unknown_peer(port, *lines), contextlib.closing(HostGroup(_host_0(port))) as hosts:
        assert len(hosts.all_gather({"mine": 1}, 0.3)) == 2
        ahead = hosts.clock_offsets(0.3)
        assert all(abs(seconds) < 2.0**64 for seconds in ahead.values())
        assert hosts.endpoints("127.0.0.1", 5555, 0.3) == [("127.0.0.1", 5555), None]


def _host_0(port: int) -> Nodes:
    return Nodes(2, 0, "127.0.0.1", port, 10.0)


def test_a_host_is_reached_where_it_came_from() -> None:
    port = free_port()
    for named in (4444, 4445):
        with (
            unknown_peer(port, value(named)),
            contextlib.closing(HostGroup(_host_0(port))) as hosts,
        ):
            assert hosts.endpoints("10.0.0.1", 5555, 1.0) == [
                ("10.0.0.1", 5555),
                ("127.0.0.1", named),
            ]


# ---- what host 0 says, or somebody in its place ----


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"index": 1},
        {"index": "1", "all": [1, 2]},
        {"index": True, "all": [1, 2]},
        {"index": 0, "all": [1, 2]},
        {"index": 2, "all": [1, 2]},
        {"index": 1, "all": {"0": 1, "1": 2}},
        {"index": 1, "all": [0] * 300},
    ],
)
def test_what_is_not_the_doctor_is_reported(answer: Any) -> None:
    told = pytest.raises(RendezvousError, match="is not the doctor: run the command on host 0")
    with impostor(answer) as nodes, contextlib.closing(HostGroup(nodes)) as hosts, told:
        hosts.all_gather("mine", 1.0)


def test_hosts_do_not_become_more_or_fewer_on_the_way() -> None:
    answers = [{"index": 1, "all": [1, 2]}, {"index": 1, "all": [1, 2, 3]}]
    with impostor(*answers) as nodes, contextlib.closing(HostGroup(nodes)) as hosts:
        assert hosts.all_gather("mine", 1.0) == [1, "mine"]
        with pytest.raises(RendezvousError, match="is not the doctor"):
            hosts.all_gather("mine", 1.0)


def test_clock_offsets_are_numbers_by_index() -> None:
    told = {"0": 1.5, "x": 2.0, ESCAPES: 3.0, "1": "late", "2": 1e300}
    answers = [{"clock": True}, {"index": 1, "all": [told, None]}]

    def ask(nodes: Nodes) -> dict[int, float]:
        with contextlib.closing(HostGroup(nodes)) as hosts:
            assert hosts._host_0 is not None
            hosts._host_0.send({"value": "so that it answers"})
            return hosts.clock_offsets(1.0)

    with impostor(*answers) as nodes:
        assert ask(nodes) == {0: 1.5}


@pytest.mark.parametrize(
    ("host_0", "fitting"), [("203.0.113.1", NOT_LOCAL), ("fe80::1%eth0", "fe80::2%eth0")]
)
def test_a_host_connects_to_addresses_only_that_hosts_of_the_job_could_have(
    host_0: str, fitting: str
) -> None:
    others = [
        [fitting, 4444],
        ["127.0.0.1", 4444],
        ["::ffff:127.0.0.1", 4444],
        ["0.0.0.0", 4444],  # to connect there means this host
        ["169.254.169.254" if host_0[0] == "2" else NOT_LOCAL, 4444],
        ["224.0.0.1", 4444],
        ["example.org", 4444],
        [fitting, 22],
        [fitting, 4444, 1],
        ESCAPES,
    ]
    told = [[NOT_LOCAL, 3333], ["10.1.1.1", 9999], *others]
    with (
        impostor({"index": 1, "all": told}) as nodes,
        contextlib.closing(HostGroup(nodes)) as hosts,
    ):
        assert hosts._host_0 is not None
        hosts._host_0.peer = host_0
        first, own, *rest = hosts.endpoints("203.0.113.9", 5555, 1.0)
    assert first == (host_0, 3333), "where this host has reached it, whatever it says"
    assert own == ("203.0.113.9", 5555), "of itself it needs to hear from nobody"
    assert rest == [(fitting, 4444), *[None] * 9]


# ---- reading and showing ----


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1},
        {"rank": "1"},
        {"rank": 10**7},
        {"nnodes": 10**9},
        {"nproc": 0},
        {"nproc": 1.5},
        {"name": 3},
        {"name": ESCAPES},
        {"versions": []},
        {"versions": {"python": 3}},
        {"versions": {"numpy": "2"}},
        {"interfaces": {"lo": "127.0.0.1"}},
        {"interfaces": {"lo": [1]}},
        {"interfaces": {ESCAPES: []}},
        {"towards": 1},
        {"settings": {"LD_PRELOAD": "x"}},
        {"memory": {"error": ""}},
        {"memory": {"error": "", "gbit": "fast", "ms": 1.0}},
        {"memory": {"error": "", "gbit": float("nan"), "ms": 1.0}},
        {"files": None},
        {"more": 1},
    ],
    ids=str,
)
def test_facts_have_the_types_that_checks_rely_on(change: dict[str, Any]) -> None:
    assert Facts.from_json(FACTS.to_json()) == FACTS
    assert Facts.from_json({**FACTS.to_json(), **change}) is None


def test_links_have_the_types_that_checks_rely_on() -> None:
    link = Link("", 2.5, 0.1)
    assert Link.from_json({"error": "", "gbit": 2.5, "ms": 0.1}) == link
    for other in ({}, [1, 2], None, {"error": 1, "gbit": 2, "ms": 3}):
        assert Link.from_json(other) is None
    assert Link.from_json({"error": "", "gbit": -1, "ms": 0}) is None


Check = Callable[[list[Facts]], list[Finding]]


@pytest.mark.parametrize(
    "check",
    [lambda hosts: check_ranks(hosts, 10**6), check_world, check_versions, check_interfaces],
)
def test_however_many_hosts_there_are_a_verdict_is_a_line(check: Check) -> None:
    def host(number: int) -> Facts:
        versions = dict.fromkeys(FACTS.versions, f"{number}")
        return replace(FACTS, rank=number // 2, nproc=number + 1, versions=versions, name="x" * 200)

    found = check([host(number) for number in range(200)])
    check_lines(found)


def test_missing_ranks_are_counted_where_they_are_many() -> None:
    [finding] = check_ranks([replace(FACTS, rank=0), replace(FACTS, rank=10**6)], 1000)
    assert finding.level is Level.FAIL
    assert finding.text.startswith("no host has rank 1, 2, 3, ")
    assert finding.text.endswith("15, 16, 983 more")


def test_a_verdict_is_never_longer_than_a_screen() -> None:
    assert len(str(ok("ranks", "x" * 10**6))) < 2100
