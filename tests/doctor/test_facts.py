"""The facts about this host, from sources that a test can replace."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.app.doctor import facts
from shardwise.app.doctor.facts import Facts, collect_facts, received
from shardwise.app.doctor.probe import PairLink, Probe
from shardwise.elastic.hosts import Nodes

ALONE = Nodes(1, 0, "127.0.0.1", 0)
PROBE = Probe("", PairLink(gbit=1.0, ms=1.0), "xpu", [("a card", 2**30)], {"driver": "1"})


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)


def test_facts_travel_as_json() -> None:
    found = collect_facts(ALONE, 2, PROBE)
    sent = json.loads(json.dumps(asdict(found)))
    assert received(Facts, sent) == found
    for other in ({**sent, "of another version": 1}, {"rank": 0}, "a peer", None):
        assert received(Facts, other) is None


def test_a_host_knows_itself_and_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host-b")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1234, 4096))
    free = {"/dev/shm": 10, tempfile.gettempdir(): 20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096 * free[path]))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("LD_PRELOAD_NOT_OURS", "x")
    found = collect_facts(Nodes(4, 3, "127.0.0.1", 29400), 8, PROBE)
    assert (found.rank, found.nnodes, found.nproc) == (3, 4, 8)
    assert found.label == "host 3 (host-b)"
    assert (found.files, found.shm_free) == (1234, 40960)
    assert (found.temporary, found.temporary_free) == ("", 81920)
    assert found.probe.models == [("a card", 2**30)]
    assert found.settings == {"NCCL_SOCKET_IFNAME": "eth7"}
    assert (found.address, found.towards) == ("127.0.0.1", "lo")
    assert found.versions.keys() == {"python", "torch", "shardwise"}


def test_a_host_without_a_route_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(towards: str) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(facts, "address_towards", unreachable)
    found = collect_facts(Nodes(2, 1, "203.0.113.1", 1), 1, PROBE)
    assert (found.address, found.towards) == ("", None)
    assert received(Facts, asdict(found)) == found


def test_a_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any, **kwargs: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(facts, "address_towards", lambda towards: "127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert collect_facts(ALONE, 1, PROBE).resolved == "unknown (Name or service not known)"


def test_a_host_without_dev_shm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(shutil, "disk_usage", missing)
    assert collect_facts(ALONE, 1, PROBE).shm_free == -1


def test_a_temporary_folder_that_cannot_be_written_to_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    found = collect_facts(ALONE, 1, PROBE)
    assert (found.temporary, found.temporary_free) == ("No such file or directory", 0)


def test_a_localhost_that_is_unknown_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert collect_facts(ALONE, 1, PROBE).localhost == ""

    def unknown(address: str) -> socket.socket:
        assert address == "localhost"
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(facts, "listening", unknown)
    assert collect_facts(ALONE, 1, PROBE).localhost == "Name or service not known"


# -- processes and threads -------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of control groups; this process is in ``job/step`` of version 2."""
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(facts, "_CGROUPS", tmp_path)
    read = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if path == Path("/proc/self/cgroup"):
            return "8:pids:/\n4:memory:/job\n0::/job/step\n"
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    return tmp_path


def limit(group: Path, most: str, current: int) -> None:
    (group / "pids.max").write_text(f"{most}\n")
    (group / "pids.current").write_text(f"{current}\n")


def test_nothing_limits_processes(groups: Path) -> None:
    limit(groups / "job" / "step", "max", 3)
    assert collect_facts(ALONE, 1, PROBE).tasks == -1


def test_the_smallest_limit_of_all_groups_counts(groups: Path) -> None:
    limit(groups / "job" / "step", "max", 3)
    limit(groups / "job", "100", 40)
    assert collect_facts(ALONE, 1, PROBE).tasks == 60, "of a group around that of this process"
    limit(groups / "pids", "50", 40)
    assert collect_facts(ALONE, 1, PROBE).tasks == 10, "of the other version"
    limit(groups / "pids", "50", 60)
    assert collect_facts(ALONE, 1, PROBE).tasks == 0


def test_the_limit_of_a_user_counts_all_threads_of_that_user(
    monkeypatch: pytest.MonkeyPatch, groups: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**6,) * 2)
    left = collect_facts(ALONE, 1, PROBE).tasks
    assert 0 < left <= 10**6 - len(os.listdir("/proc/self/task"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert collect_facts(ALONE, 1, PROBE).tasks == -1, "root is free of it"
