"""Processes that are started as ranks: what they report, and every way in which they fail."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.doctor import probe
from shardwise.app.doctor.facts import received
from shardwise.app.doctor.measure import PairLink
from shardwise.app.doctor.probe import Accelerators, Probe, probe_ranks
from shardwise.base import devices
from shardwise.base.devices import Model
from shardwise.base.scratch import libc
from tests.hosts.network import needs_hosts

H100 = "NVIDIA H100 80GB HBM3"


def test_ranks_start_and_report_what_torch_sees_and_how_they_share() -> None:
    found = probe_ranks()
    assert found.error == ""
    assert found.accelerators.kind == (
        "" if devices.accelerator() is None else devices.default_type()
    )
    assert len(found.accelerators.models) == devices.count()
    assert found.accelerators.versions == devices.versions()
    if libc.has_futex():
        assert found.memory.error == ""
        assert found.memory.gbit > 0
        assert 0 < found.memory.ms < 1000


def test_what_a_rank_reports_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "models", lambda: [Model(H100, 2**36)] * 2)
    monkeypatch.setattr(devices, "versions", lambda: {"driver": "580.95.05", "NCCL": "2.27.5"})
    monkeypatch.setattr(devices, "why_none", lambda: "why not")
    found = probe._find()
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


WITHOUT_FUTEX = """
import runpy
from shardwise.base.scratch import libc
libc.has_futex = lambda: False
runpy.run_module("shardwise.app.doctor.probe", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (
            lambda command, rank: (["sleep", "600"] if rank == "1" else command, {}),
            "between two ranks: ",
        ),
        (lambda command, rank: (["false"] if rank == "1" else command, {}), "between two ranks: "),
        (lambda command, rank: (command, {"preexec_fn": limited}), "are limited to 1 MiB"),
        (
            lambda command, rank: ([command[0], "-c", WITHOUT_FUTEX, *command[4:]], {}),
            "is for Linux on x86-64",
        ),
        pytest.param(
            lambda command, rank: (["unshare", "--net", *command], {}), "lo", marks=needs_hosts
        ),
    ],
    ids=["one that hangs", "one that ends", "ulimit -f", "no futex", "no loopback device"],
)
def test_ranks_that_start_may_still_not_share_memory(
    monkeypatch: pytest.MonkeyPatch, changed: Start, error: str
) -> None:
    monkeypatch.setattr(probe, "MEET", 3.0)
    found = probing(monkeypatch, changed)
    assert found.error == ""
    assert found.accelerators.versions == devices.versions()
    assert error in found.memory.error


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 1},
        {"models": {}},
        {"models": [["one"]]},
        {"models": [["one", "2"]]},
        {"models": [["one", -1]]},
        {"models": [["\x1b[2J", 1]]},
        {"models": [["one", 1]] * 2000},
        {"versions": {"driver": 580}},
        {"versions": {"\n": "580"}},
        {"versions": {f"{i}": "580" for i in range(17)}},
        {"problem": None},
    ],
    ids=lambda change: str(change)[:40],
)
def test_accelerators_have_the_types_that_checks_rely_on(change: dict[str, Any]) -> None:
    sent = {"kind": "", "models": [["one", 1]], "versions": {}, "problem": ""}
    assert received(Accelerators, sent) == Accelerators(models=[("one", 1)])
    assert received(Accelerators, {**sent, **change}) is None
