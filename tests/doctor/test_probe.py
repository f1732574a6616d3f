"""Processes that are started as ranks: what they report, and every way in which they fail."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.doctor import probe
from shardwise.app.doctor.probe import PairLink, Probe, probe_ranks
from shardwise.base import devices, libc
from tests.harness import Processes, run_ranks
from tests.hosts.network import needs_hosts

H100 = "NVIDIA H100 80GB HBM3"


def test_what_a_rank_reports_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "models", lambda: [(H100, 2**36)] * 2)
    monkeypatch.setattr(devices, "versions", lambda: {"driver": "580.95.05", "NCCL": "2.27.5"})
    monkeypatch.setattr(devices, "why_none", lambda: "why not")
    found = probe._find(PairLink())
    assert found.models == [(H100, 2**36)] * 2
    assert found.versions == {"driver": "580.95.05", "NCCL": "2.27.5"}
    assert found.problem == "why not"


Command = list[str]
Start = Callable[[Command, str], tuple[Command, dict[str, Any]]]


def probing(monkeypatch: pytest.MonkeyPatch, changed: Start) -> Probe:
    """Probe with other commands and options, given those of the probe and the number of a rank."""
    start = subprocess.Popen

    def popen(command: Command, **options: Any) -> Any:
        assert command[1:4] == ["-P", "-m", "shardwise.app.doctor.probe"]
        assert options["start_new_session"]
        other, more = changed(command, command[5])
        return start(other, **{**options, **more})

    monkeypatch.setattr(subprocess, "Popen", popen)
    return probe_ranks()


def failing(monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Run other code in place of the probe's; return the error."""
    return probing(
        monkeypatch, lambda command, rank: ([command[0], "-c", code, *command[4:]], {})
    ).error


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import torch_that_is_not_there", "exit code 1: ModuleNotFoundError: No module named "),
        ("raise SystemExit(3)", "exit code 3: it printed nothing"),
        ("raise SystemExit('\\x1b[2J')", "exit code 1: \N{REPLACEMENT CHARACTER}[2J"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: it printed nothing"),
        ("", "the report of a rank: found b'', expected Probe"),
        ("import sys; open(sys.argv[1] + '/report', 'w').write('{')", "the report of a rank: "),
        ("import sys; open(sys.argv[1] + '/report', 'w').write('[]')", "the report of a rank: "),
    ],
)
def test_a_rank_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, code: str, error: str) -> None:
    assert failing(monkeypatch, code).startswith(error)


def test_a_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "START", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert failing(monkeypatch, "import time; time.sleep(600)") == "no answer for 0 s"
    assert not list(tmp_path.iterdir()), "and leaves nothing behind"


def test_a_python_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert probe_ranks() == Probe("No such file or directory", memory=PairLink("no rank starts"))


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))


def test_a_rank_reports_all_else_if_no_memory_can_be_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def changed(command: Command, rank: str) -> tuple[Command, dict[str, Any]]:
        return (["sleep", "600"], {}) if rank == "1" else (command, {"preexec_fn": limited})

    found = probing(monkeypatch, changed)
    assert found.error == ""
    assert found.versions == devices.versions()
    assert "are limited to 1 MiB" in found.memory.error


def without_futex() -> None:
    libc.has_futex = lambda: False


def without_loopback() -> None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # which the harness sets
    assert ctypes.CDLL(None).unshare(0x40000000) == 0, "CLONE_NEWNET"


def sharing(rank: int, world_size: int, store: Path, spoil: Callable[[], None]) -> str:
    spoil()
    return probe._share(store, rank, 3.0).error


@pytest.mark.parametrize(
    ("world_size", "spoil", "error"),
    [
        pytest.param(1, int, "between two ranks: ", id="one that never comes"),
        pytest.param(2, without_futex, "is for Linux on x86-64", id="no futex"),
        pytest.param(
            2, without_loopback, "address for: lo", marks=needs_hosts, id="no loopback device"
        ),
    ],
)
def test_ranks_that_start_may_still_not_share_memory(
    tmp_path: Path, world_size: int, spoil: Callable[[], None], error: str
) -> None:
    new = {"backend": None, "processes": Processes.NEW}
    for found in run_ranks(sharing, world_size, tmp_path / "store", spoil, **new):
        assert error in found
