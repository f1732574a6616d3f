"""The facts about this host, from sources that a test can replace."""

from __future__ import annotations

import json
import os
import resource
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.doctor import facts
from shardwise.doctor.facts import Facts, collect_facts
from shardwise.doctor.measure import Link
from shardwise.launch.hosts import Nodes

ALONE = Nodes(1, 0, "127.0.0.1", 0)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "measure_shared_memory", lambda: Link(gbit=1.0, ms=1.0))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)


def test_facts_travel_as_json() -> None:
    found = collect_facts(ALONE, 2)
    sent = json.loads(json.dumps(found.to_json()))
    assert Facts.from_json(sent) == found
    for other in ({**sent, "of another version": 1}, {"rank": 0}, "a peer", None):
        assert Facts.from_json(other) is None


def test_a_host_knows_itself_and_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host-b")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1234, 4096))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("LD_PRELOAD_NOT_OURS", "x")
    found = collect_facts(Nodes(4, 3, "127.0.0.1", 29400), 8)
    assert (found.rank, found.nnodes, found.nproc) == (3, 4, 8)
    assert found.label == "host 3 (host-b)"
    assert (found.files, found.shm_free) == (1234, 40960)
    assert found.settings == {"NCCL_SOCKET_IFNAME": "eth7"}
    assert (found.address, found.towards) == ("127.0.0.1", "lo")
    assert found.versions.keys() == {"python", "torch", "shardwise"}


def test_a_host_without_a_route_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(towards: str) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(facts, "address_towards", unreachable)
    found = collect_facts(Nodes(2, 1, "203.0.113.1", 1), 1)
    assert (found.address, found.towards) == ("", None)
    assert Facts.from_json(found.to_json()) == found


def test_a_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(facts, "address_towards", lambda towards: "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert collect_facts(ALONE, 1).resolved == "unknown (Name or service not known)"


def test_a_host_without_dev_shm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", missing)
    assert collect_facts(ALONE, 1).shm_free == -1
