"""A process that is started as a rank: what it reports, and every way in which it fails."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.doctor import probe
from shardwise.app.doctor.facts import received
from shardwise.app.doctor.probe import Accelerators, Probe, probe_rank
from shardwise.base import devices
from shardwise.base.devices import Model

H100 = "NVIDIA H100 80GB HBM3"


def test_a_rank_starts_and_reports_what_torch_sees() -> None:
    found = probe_rank()
    assert found.error == ""
    assert found.accelerators.kind == (
        "" if devices.accelerator() is None else devices.default_type()
    )
    assert len(found.accelerators.models) == devices.count()
    assert found.accelerators.versions == devices.versions()


def test_what_a_rank_reports_is_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "models", lambda: [Model(H100, 2**36)] * 2)
    monkeypatch.setattr(devices, "versions", lambda: {"driver": "580.95.05", "NCCL": "2.27.5"})
    monkeypatch.setattr(devices, "why_none", lambda: "why not")
    found = probe._find()
    assert found.models == [(H100, 2**36)] * 2
    assert found.versions == {"driver": "580.95.05", "NCCL": "2.27.5"}
    assert found.problem == "why not"


def failing(monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """Run other code in place of the probe's; return the error."""
    start = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-P", "-m", "shardwise.app.doctor.probe"]
        assert options["start_new_session"]
        return start([command[0], "-c", code, *command[4:]], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return probe_rank().error


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import torch_that_is_not_there", "exit code 1: ModuleNotFoundError: No module named "),
        ("raise SystemExit(3)", "exit code 3: it printed nothing"),
        ("raise SystemExit('\\x1b[2J')", "exit code 1: \N{REPLACEMENT CHARACTER}[2J"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: it printed nothing"),
        ("", "the report of a rank: found b'', expected Accelerators"),
        ("import sys; open(sys.argv[1], 'w').write('{')", "the report of a rank: found b'{'"),
        ("import sys; open(sys.argv[1], 'w').write('[]')", "the report of a rank: found '[]'"),
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
    assert probe_rank() == Probe("No such file or directory")


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
