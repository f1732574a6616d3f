"""Whoever reaches the doctor's port can send anything: none of it steers a terminal or a socket."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import pytest

from shardwise.app.doctor import diagnose as group
from shardwise.app.doctor.checks import (
    Finding,
    Level,
    check_devices,
    check_interfaces,
    check_limits,
    check_names,
    check_ranks,
    check_start,
    check_versions,
    check_world,
    ok,
)
from shardwise.app.doctor.diagnose import DoctorReport, HostGroup, RendezvousError, diagnose
from shardwise.app.doctor.facts import Facts, collect_facts, received
from shardwise.app.doctor.probe import PairLink, Probe
from shardwise.elastic.hosts import Nodes
from shardwise.elastic.network import listening
from shardwise.elastic.registry import REPORT, Registry
from shardwise.elastic.store import GuardedStore

ESCAPES = "\x1b[2J\x1b]0;mine\x07\r\n\u202eok   ranks"
PEER = "the name of a peer"
WAIT = 120.0  # seconds that anything may take on a busy machine; host 0 first imports torch
NOT_LOCAL = "203.0.113.7"  # reserved for documentation


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_GRACE", 0.05)
    monkeypatch.setattr(group, "_SLACK", 0.5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def peer(nodes: Nodes, *values: bytes) -> Iterator[None]:
    """Connect to host 0 as a host does, send what that would send, and stay."""

    def talk() -> None:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                store = GuardedStore(nodes.address, nodes.port, nodes.token, PEER, WAIT)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with contextlib.closing(store), contextlib.suppress(OSError):  # it may be dropped
            for step, each in enumerate(values, 1):
                while json.loads(store.get("server/plan"))["step"] < step - 1:
                    time.sleep(0.01)
                store.set(f"{REPORT}{PEER}", b'{"step":%d,"value":%s}' % (step, each))
            left.wait()

    left = threading.Event()
    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


class Impostor:
    """Something that serves a registry in place of host 0.

    Args:
        first: what it publishes when a host has come, given the digest of the host's name.
    """

    def __init__(self, first: Callable[[str], Any]) -> None:
        listener = listening("127.0.0.1")
        self.nodes = Nodes(4, 1, "127.0.0.1", listener.getsockname()[1], 5.0)
        self.registry = Registry(listener, b"", DoctorReport)
        self._first = first
        self._thread = threading.Thread(target=self._admit)
        self._thread.start()

    def _admit(self) -> None:
        while not (names := self.registry.store.clients()):
            time.sleep(0.01)
        self.plan = self._first(group._digest(next(iter(names))))
        if self.plan is not None:
            self.registry.publish(self.plan)

    def answer(self, step: int, *values: Any) -> None:
        """Publish the values of a step."""
        self.registry.publish({**self.plan, "step": step, "values": values})

    def close(self) -> None:
        self._thread.join()
        self.registry.close()


def plan_of(digest: str, addresses: Any = ("", "10.1.1.1"), index: int = 1) -> dict[str, Any]:
    """What host 0 publishes, in which a host has this index."""
    names = ["?" for _ in addresses]
    names[index:index] = [digest]
    return {"step": 0, "values": [], "addresses": addresses, "names": names}


@contextlib.contextmanager
def impostor(first: Callable[[str], Any] = plan_of) -> Iterator[Impostor]:
    with contextlib.closing(Impostor(first)) as there:
        yield there


def sent(value: Any) -> bytes:
    return json.dumps(value).encode()


def check_lines(findings: list[Finding]) -> None:
    for line in map(str, findings):
        assert line.isprintable(), line
        assert len(line) < 2100


# ---- what is said ----


@pytest.fixture(scope="module")
def facts() -> Facts:
    """What is true of this host, on which no rank was started."""
    return collect_facts(Nodes(2, 1, "127.0.0.1", 1), 1, Probe())


def test_a_diagnosis_shows_nothing_raw_and_connects_to_nobody_who_was_named(facts: Facts) -> None:
    hostile = replace(
        facts,
        name=ESCAPES * 1000,
        versions=dict.fromkeys(facts.versions, ESCAPES),
        interfaces={ESCAPES + str(i): [ESCAPES] * 9 for i in range(99)},
        resolved=ESCAPES,
        towards="eth0; rm -rf ~",
        settings={"GLOO_SOCKET_IFNAME": ESCAPES},
        localhost=ESCAPES,
        probe=Probe(
            "", PairLink(ESCAPES * 50), ESCAPES, [(ESCAPES, 1)], {ESCAPES: ESCAPES}, ESCAPES
        ),
    )
    nodes, said = host_0(), list[Finding]()
    with socket.create_server(("127.0.0.2", 0)) as trap:
        port = trap.getsockname()[1]
        values = [sent(asdict(hostile)), sent(["127.0.0.2", port])]
        values += [sent({"error": ESCAPES, "gbit": 1, "ms": 1e17, "ahead": 1e17})] * 2
        with peer(nodes, *values):
            assert not diagnose(nodes, replace(facts, rank=0), 0.0, said.append)
        trap.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            trap.accept()
    check_lines(said)
    shown = "\n".join(map(str, said))
    assert "host 1 (\N{REPLACEMENT CHARACTER}[2J" in shown, "what was said is shown, but made safe"
    assert "export GLOO_SOCKET_IFNAME='eth0; rm -rf ~'" in shown
    assert all(len(line) < 2100 for line in shown.splitlines())


@pytest.mark.parametrize(
    "value",
    [
        b"GET / HTTP/1.1",
        b"[" * 100_000,
        b"[" * 900 + b"]" * 900,
        b"\xff\xfe\0",
        b"",
        sent(None),
        sent([1]),
        sent([NOT_LOCAL, 22]),
        sent({"rank": 1}),
        sent(float("nan")),
        sent(10**400),
        sent("\x1b" * 2**17),
        b"1" * 5000,
    ],
    ids=lambda value: repr(value[:20]),
)
def test_whatever_a_peer_sends_host_0_continues(value: bytes) -> None:
    nodes = host_0()
    with peer(nodes, *[value] * 6), contextlib.closing(HostGroup(nodes)) as hosts:
        assert len(hosts.all_gather({"mine": 1}, 0.3)) == 2
        assert hosts.endpoints("127.0.0.1", 5555, 0.3) == [("127.0.0.1", 5555), None]


def test_what_is_no_store_client_is_no_host() -> None:
    nodes = host_0()
    with contextlib.ExitStack() as stack:

        def knock() -> None:
            for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"", b"{}\n" * 9):
                stranger = socket.create_connection((nodes.address, nodes.port), timeout=10.0)
                stack.enter_context(stranger)
                stranger.sendall(greeting)

        timer = threading.Timer(0.3, knock)
        timer.start()
        short = replace(nodes, timeout=1.0)
        with contextlib.closing(HostGroup(short)) as hosts:
            assert hosts.all_gather("mine", 0.3) == ["mine"]
        timer.join()


def test_hosts_with_another_token_are_kept_out() -> None:
    nodes = replace(host_0(), token=b"the token of this job", timeout=1.0)
    stranger = replace(nodes, rank=1, token=b"a token of another job")
    found: list[RendezvousError] = []

    def join() -> None:
        try:
            HostGroup(stranger).close()
        except RendezvousError as error:
            found.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    with contextlib.closing(HostGroup(nodes)) as hosts:
        assert hosts.all_gather("mine", 0.3) == ["mine"]
    thread.join()
    [error] = found
    assert "found another token" in error.finding.text
    assert error.finding.advice.startswith("give all hosts the same --rdzv-token-file")


def host_0() -> Nodes:
    return Nodes(2, 0, "127.0.0.1", free_port(), 10.0)


def test_a_host_is_reached_where_it_came_from() -> None:
    nodes = host_0()
    with peer(nodes, sent(4444)), contextlib.closing(HostGroup(nodes)) as hosts:
        assert hosts.addresses == ["", "127.0.0.1"]
        expected = [("10.0.0.1", 5555), ("127.0.0.1", 4444)]
        assert hosts.endpoints("10.0.0.1", 5555, 1.0) == expected


@contextlib.contextmanager
def two(first: Nodes) -> Iterator[tuple[HostGroup, HostGroup]]:
    """Bring host 0 and another host together, each with a thread of its own at first."""
    with ThreadPoolExecutor(1) as threads, contextlib.ExitStack() as stack:
        other = threads.submit(HostGroup, replace(first, rank=1))
        hosts = stack.enter_context(contextlib.closing(HostGroup(first)))
        yield hosts, stack.enter_context(contextlib.closing(other.result()))


def test_values_reach_all_hosts() -> None:
    with two(replace(host_0(), token=b"the token of this job")) as (first, other):
        with ThreadPoolExecutor(1) as threads:
            theirs = threads.submit(other.all_gather, {"b": 1}, 10.0)
            assert first.all_gather("a", 10.0) == ["a", {"b": 1}]
            assert theirs.result() == ["a", {"b": 1}]
            where = threads.submit(other.endpoints, "127.0.0.1", 5555, 10.0)
            assert first.endpoints("127.0.0.1", 4444, 10.0)[1] == ("127.0.0.1", 5555)
            assert where.result() == [("127.0.0.1", 4444), ("127.0.0.1", 5555)]
        assert (first.index, other.index) == (0, 1)


def test_a_host_that_leaves_is_noticed_at_once() -> None:
    with two(host_0()) as (first, other):
        other.close()
        began = time.monotonic()
        assert first.all_gather("a", 60.0) == ["a", None]
        assert first.all_gather("b", 60.0) == ["b", None]
        assert time.monotonic() - began < 30.0


def test_a_host_that_is_silent_for_too_long_is_dropped_and_is_told() -> None:
    with two(host_0()) as (first, other):
        assert first.all_gather("a", 0.1) == ["a", None]
        with pytest.raises(RendezvousError, match="it was silent for too long"):
            other.all_gather("b", 10.0)


def test_host_0_that_leaves_is_named() -> None:
    with two(host_0()) as (first, other):
        thread = threading.Thread(target=first.close)
        thread.start()
        with pytest.raises(RendezvousError, match=r"left or went silent .*the store was closed"):
            other.all_gather("b", 60.0)
        thread.join()


def test_a_host_that_comes_too_late_is_told() -> None:
    with two(host_0()) as (first, _):
        late = replace(first._nodes, rank=1)
        with pytest.raises(RendezvousError, match="has begun without this host: run the command"):
            HostGroup(late)


def test_hosts_that_cannot_import_torch_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(RendezvousError, match=r"torch cannot be imported here \(libcudart"):
        HostGroup(host_0())


# ---- what host 0 says, or somebody in its place ----


@pytest.mark.parametrize(
    "first",
    [
        lambda digest: None,
        lambda digest: [digest],
        lambda digest: {"step": 0, "addresses": ["", ""], "names": ["", digest]},
        lambda digest: plan_of(digest) | {"step": "0"},
        lambda digest: plan_of(digest) | {"names": digest},
        lambda digest: plan_of(digest, {"0": "", "1": ""}),
        lambda digest: plan_of(digest, ["", 2]),
        lambda digest: plan_of(digest, [""] * 300),
    ],
)
def test_what_is_not_the_doctor_is_reported(
    monkeypatch: pytest.MonkeyPatch, first: Callable[[str], Any]
) -> None:
    monkeypatch.setattr(group, "_SLACK", 0.1)
    told = pytest.raises(RendezvousError, match="is not the doctor: run the command on host 0")
    with impostor(first) as there, told:
        HostGroup(replace(there.nodes, timeout=5.0 if first("x") else 0.1))


@pytest.mark.parametrize("index", [0, 2])
def test_a_host_that_is_given_the_place_of_host_0_or_none_is_told(index: int) -> None:
    told = pytest.raises(RendezvousError, match="has begun without this host")
    with impostor(lambda digest: plan_of(digest, index=index)) as there, told:
        HostGroup(there.nodes)


def test_a_host_0_that_publishes_too_few_values_is_no_host_0() -> None:
    with impostor() as there, contextlib.closing(HostGroup(there.nodes)) as hosts:
        there.answer(1, 3333)
        with pytest.raises(RendezvousError, match="found 1 values for 2 hosts"):
            hosts.all_gather("mine", 1.0)


@pytest.mark.parametrize(
    ("host_0", "fitting"), [("203.0.113.1", NOT_LOCAL), ("fe80::1%eth0", "fe80::2%eth0")]
)
def test_a_host_connects_to_addresses_only_that_hosts_of_the_job_could_have(
    host_0: str, fitting: str
) -> None:
    others = [
        (fitting, 4444),
        ("127.0.0.1", 4444),
        ("::ffff:127.0.0.1", 4444),
        ("0.0.0.0", 4444),  # to connect there means this host
        ("169.254.169.254" if host_0[0] == "2" else NOT_LOCAL, 4444),
        ("224.0.0.1", 4444),
        ("example.org", 4444),
        (fitting, 22),
        (fitting, True),
        (fitting, [4444]),
        (ESCAPES, 4444),
    ]
    told = [(NOT_LOCAL, 3333), ("10.1.1.1", 9999), *others]
    addresses, ports = zip(*told, strict=True)
    first = functools.partial(plan_of, addresses=addresses)
    with impostor(first) as there, contextlib.closing(HostGroup(there.nodes)) as hosts:
        assert hosts._client is not None
        hosts._client.store.peer = host_0
        there.answer(1, *ports)
        first, own, *rest = hosts.endpoints("203.0.113.9", 5555, 1.0)
    assert first == (host_0, 3333), "where this host has reached it, whatever it says"
    assert own == ("203.0.113.9", 5555), "of itself it needs to hear from nobody"
    assert rest == [(fitting, 4444), *[None] * 10]


# ---- reading and showing ----


PROBE = {**asdict(Probe()), "models": [["one", 1]]}


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
        {"versions": []},
        {"versions": {"python": 3}},
        {"versions": {"numpy": "2"}},
        {"interfaces": {"lo": "127.0.0.1"}},
        {"interfaces": {"lo": [1]}},
        {"towards": 1},
        {"settings": {"LD_PRELOAD": "x"}},
        {"files": None},
        {"localhost": 1},
        {"temporary_free": -1},
        {"tasks": "many"},
        {"probe": {}},
        {"probe": {**PROBE, "kind": 1}},
        {"probe": {**PROBE, "models": {}}},
        {"probe": {**PROBE, "models": [["one"]]}},
        {"probe": {**PROBE, "models": [["one", "2"]]}},
        {"probe": {**PROBE, "models": [["one", -1]]}},
        {"probe": {**PROBE, "models": [["one", 1]] * 2000}},
        {"probe": {**PROBE, "versions": {"driver": 580}}},
        {"probe": {**PROBE, "versions": {f"{i}": "580" for i in range(17)}}},
        {"probe": {**PROBE, "problem": None}},
        {"probe": {**PROBE, "memory": {"error": ""}}},
        {"probe": {**PROBE, "memory": {"error": "", "gbit": "fast", "ms": 1.0, "ahead": 0.0}}},
        {"probe": {**PROBE, "memory": {"error": "", "gbit": math.nan, "ms": 1.0, "ahead": 0.0}}},
        {"more": 1},
    ],
    ids=lambda change: str(change)[-40:],
)
def test_facts_have_the_types_that_checks_rely_on(facts: Facts, change: dict[str, Any]) -> None:
    with_a_model = replace(facts, probe=Probe(models=[("one", 1)]))
    assert received(Facts, {**asdict(facts), "probe": PROBE}) == with_a_model
    assert received(Facts, {**asdict(facts), **change}) is None


def test_links_have_the_types_that_checks_rely_on() -> None:
    link = PairLink("", 2.5, 0.1, -3.0)
    sent = {"error": "", "gbit": 2.5, "ms": 0.1, "ahead": -3}
    assert received(PairLink, sent) == link
    for other in ({}, [1, 2], None, {**sent, "error": 1}):
        assert received(PairLink, other) is None
    for name in ("gbit", "ms"):
        assert received(PairLink, {**sent, name: -1}) is None
    assert received(PairLink, {**sent, "ahead": 1e300}) is None


Check = Callable[[list[Facts]], list[Finding]]


@pytest.mark.parametrize(
    "check",
    [
        lambda hosts: check_ranks(hosts, 10**6),
        check_world,
        check_versions,
        check_start,
        check_devices,
        lambda hosts: check_names(hosts, dict.fromkeys(range(200), "203.0.113.7")),
        check_interfaces,
        check_limits,
    ],
)
def test_however_many_hosts_there_are_a_verdict_is_a_line(facts: Facts, check: Check) -> None:
    def host(number: int) -> Facts:
        versions = dict.fromkeys(facts.versions, f"{number}")
        many = [("y" * 200 + str(each), each) for each in range(100)]
        error, libraries = "x" * 200 if number % 2 else "", dict.fromkeys(versions, f"{number}")
        probe = Probe(error, PairLink(), "z" * 200, many, libraries, "x" * 200)
        return replace(
            facts,
            rank=number // 2,
            nproc=number + 1,
            versions=versions,
            name="x" * 200,
            probe=probe,
            temporary="x" * 200,
            localhost="x" * 200,
        )

    found = check([host(number) for number in range(200)])
    check_lines(found)


def test_missing_ranks_are_counted_where_they_are_many(facts: Facts) -> None:
    [finding] = check_ranks([replace(facts, rank=0), replace(facts, rank=10**6)], 1000)
    assert finding.level is Level.FAIL
    assert finding.text.startswith("no host has rank 1, 2, 3, ")
    assert finding.text.endswith("15, 16, 983 more")


def test_a_verdict_is_never_longer_than_a_screen() -> None:
    assert len(str(ok("ranks", "x" * 10**6))) < 2100
