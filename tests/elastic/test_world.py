"""Which world a process finds in its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.base.errors import UserError
from shardwise.elastic import world as world_
from shardwise.elastic.world import (
    JOB,
    MOST_RANKS,
    PARENT_PID,
    WORKER_JOB,
    World,
    find_world,
    job_id,
    most_ranks,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def _without_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def in_torchrun(_without_a_world: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Be a rank of torchrun; the value changes the environment."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("_without_a_world")
def test_no_variables_no_world() -> None:
    assert find_world() is None


@pytest.mark.usefixtures("in_torchrun")
def test_the_world_of_torchrun() -> None:
    world = find_world()
    assert world == World(rank=3, size=4, local_rank=1, local_size=2)
    assert world.hosts == 2


def test_without_local_variables_all_ranks_are_on_one_host(
    in_torchrun: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        in_torchrun.delenv(name)
    assert find_world() == World(rank=3, size=4, local_rank=3, local_size=4)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_world_is_an_error(in_torchrun: pytest.MonkeyPatch, missing: str) -> None:
    in_torchrun.delenv(missing)
    with pytest.raises(UserError, match=f"found no {missing}"):
        find_world()


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "4"), ("RANK", "x"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-1"), ("RANK", "")],
)
def test_numbers_out_of_range_are_an_error(
    in_torchrun: pytest.MonkeyPatch, name: str, value: str
) -> None:
    in_torchrun.setenv(name, value)
    with pytest.raises(UserError, match=f"found {name}={value}, expected"):
        find_world()


@pytest.mark.parametrize(
    ("cores", "gigabytes", "expected"), [(2, 24, 32), (64, 24, 96), (1, 8, 16), (1, 0.1, 1)]
)
def test_a_host_carries_so_many_ranks(
    monkeypatch: pytest.MonkeyPatch, cores: int, gigabytes: float, expected: int
) -> None:
    found = {"SC_PHYS_PAGES": int(gigabytes * 2**18), "SC_PAGE_SIZE": 2**12}
    monkeypatch.delenv(MOST_RANKS, raising=False)
    monkeypatch.setattr(world_, "usable_cores", lambda: cores)
    monkeypatch.setattr(os, "sysconf", found.__getitem__)
    most, text = most_ranks()
    assert most == expected
    assert text.startswith(f"at most {expected}: this host has {cores} cores, for 16 ranks each")
    monkeypatch.setenv(MOST_RANKS, "100000")
    assert most_ranks() == (100000, "at most 100000, as SHARDWISE_MOST_RANKS says")
    monkeypatch.setenv(MOST_RANKS, "many")
    with pytest.raises(UserError, match="found SHARDWISE_MOST_RANKS=many, expected at least 1"):
        most_ranks()


def test_a_job_is_named_by_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PARENT_PID, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(JOB, "of a launcher further up")
    assert job_id() is None
    monkeypatch.setenv(WORKER_JOB, "of a program with workers")
    assert job_id() == "of a program with workers"
    monkeypatch.setenv(PARENT_PID, "1")
    assert job_id() == "of a launcher further up"


AGENT = """
import os
from shardwise.elastic.world import job_id
for _ in range(2):
    if not os.fork():
        print(job_id(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the kernel in /proc")
def test_under_torchrun_a_job_lasts_as_long_as_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs may have the same run id, as every one without rendezvous has: ``none``."""
    monkeypatch.delenv(PARENT_PID, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    told = [
        subprocess.run(
            [sys.executable, "-c", AGENT],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert told[0] == told[0][:1] * 2
    assert told[1] == told[1][:1] * 2
    assert told[0][0].startswith("none, process ")
    assert told[0][0] != told[1][0]
