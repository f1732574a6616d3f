"""The doctor on one host, and what the guide says about it. Faults are in tests/hosts."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.app.doctor.diagnose import SECONDS, _ahead
from shardwise.app.doctor.probe import START, PairLink, Probe
from shardwise.base import devices, libc
from tests.cli.shell import call
from tests.programs import shell_environment, start_program

GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "hosts.md"


def documented_checks() -> list[str]:
    """The checks that the table of the page has a row for, in the order in which they run."""
    table = GUIDE.read_text().split("## What the doctor checks")[1]
    return re.findall(r"^\| `([\w ]+)` \|", table, re.MULTILINE)


def test_the_documented_limits_are_those_of_the_code() -> None:
    text = " ".join(GUIDE.read_text().split())
    assert f"{START:.0f} s for a process that is started as a rank" in text
    assert f"{SECONDS['facts']:.0f} s for each host to describe itself" in text
    assert f"{SECONDS['links']:.0f} s for each of the N rounds" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nproc 0", "--nproc: found 0, expected 1 or more"),
        ("--timeout nan", "--timeout: found nan, expected a number above 0"),
        ("--least-gbit -1", "--least-gbit: found -1.0, expected 0 or more"),
        ("--nnodes 2", "--node-rank: found nothing, expected 0 to 1"),
        (
            "--nnodes 1:2 --rdzv a:1",
            "--nnodes: found 1:2, expected the number of hosts that run the doctor now",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert call("doctor", *options.split()) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_a_host_alone_needs_no_torch() -> None:
    code = """
import sys
import shardwise.app.doctor.diagnose
from shardwise.app.doctor.diagnose import HostGroup
from shardwise.elastic.hosts import Nodes
assert HostGroup(Nodes(1, 0, "127.0.0.1", 0)).all_gather(1, 1.0) == [1]
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# The command, and what it has measured, in a file.
MEASURING = """
import pickle
from pathlib import Path
from shardwise.app.cli.main import app
from shardwise.app.doctor import probe

probe_ranks = probe.probe_ranks

def measuring():
    found = probe_ranks()
    Path("found").write_bytes(pickle.dumps(found))
    return found

probe.probe_ranks = measuring
app()
"""


def test_a_host_alone_starts_ranks_and_is_looked_at_without_any_other(tmp_path: Path) -> None:
    (tmp_path / "measuring.py").write_text(MEASURING)
    words = ["measuring.py", "doctor", "--nproc", "2"]
    command = start_program(words, folder=tmp_path, env=shell_environment())
    out, err = command.communicate(timeout=120)
    assert not err, err
    found = pickle.loads((tmp_path / "found").read_bytes())
    assert isinstance(found, Probe)
    assert found.error == ""
    assert found.kind == ("" if devices.accelerator() is None else devices.default_type())
    assert len(found.models) == devices.count()
    assert found.versions == devices.versions()
    if libc.has_futex():
        assert found.memory.error == ""
        assert found.memory.gbit > 0
        assert 0 < found.memory.ms < 1000
    lines = out.splitlines()
    assert (command.returncode == 0) == (not any(line.startswith("fail") for line in lines))
    assert {line[5:17].strip() for line in lines} == {*documented_checks()} - {"links"}
    [inside] = [line for line in lines if line[5:11] == "inside"]
    figures = r"\d+\.\d\d Gbit/s, \d+\.\d\d ms"
    shared = f"shared memory {found.memory}" if libc.has_futex() else "no shared memory"
    assert re.search(f"{re.escape(shared)}; messages {figures}", inside)


def test_clocks_are_compared_over_the_connections_that_work() -> None:
    fast, broken = PairLink(ahead=9.0), PairLink("timed out")
    measured = {(0, 0): fast, (0, 1): PairLink(ahead=1.0), (1, 0): PairLink(ahead=-2.0)}
    measured |= {(0, 2): broken, (2, 0): PairLink(ahead=-3.0), (0, 3): broken, (3, 1): fast}
    assert _ahead(measured, [0, 1, 2, 3]) == {1: 1.0, 2: 3.0}, "host 0 is asked first"
    assert _ahead(measured, [0, 2]) == {1: 3.0}, "by index of those that can be read"
