"""The launcher of replicas that are worlds of their own, with ranks that only pretend to train."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwise.elastic.replicas import ReplicaLauncher
from shardwise.elastic.world import ReplicaWorld, find_replica

# torch's agent leaves the files of its ranks to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

#: A rank does what the file of its replica says for this start: end, be killed, or wait.
_RANK = """
import json, os, signal, sys, time
given = json.loads(os.environ["SHARDWISE_REPLICA"])
replica, start = str(given["number"]), str(given["restarts"])
what = open(os.path.join({folder!r}, replica + "-" + start)).read()
with open(os.path.join({folder!r}, "log"), "a") as log:
    log.write(replica + "-" + start + "-" + os.environ["RANK"] + "\\n")
while what.startswith("wait"):
    if os.path.exists(os.path.join({folder!r}, what.split()[1])):
        break
    time.sleep(0.01)
if what == "kill" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hang" or what == "kill":
    time.sleep(600)
sys.exit(3 if what == "fail" else 0)
"""


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()


class Trial:
    """A launcher, and what its replicas do at each start."""

    def __init__(self, folder: Path, plans: dict[str, str], ranks: int = 1) -> None:
        self._log = folder / "log"
        for name, what in plans.items():
            (folder / name).write_text(what)
        self.started: list[str] = []
        self.lost: list[tuple[int, str]] = []
        count = 1 + max(int(name.partition("-")[0]) for name in plans)
        self.launcher = ReplicaLauncher(
            lambda attempt: [sys.executable, "-S", "-c", _RANK.format(folder=str(folder))],
            ReplicaWorld(0, count, "nowhere:1", "", 0),
            ranks,
            2,
            started=lambda replica, pids: self.started.append(
                f"{replica.number}-{replica.restarts}"
            ),
            lost=self._note_lost,
        )

    def _note_lost(self, replica: ReplicaWorld, why: str) -> None:
        self.lost.append((replica.number, why))
        self._log.with_name("lost").touch()

    @property
    def ran(self) -> set[str]:
        """The ranks that ran: replica, start and rank."""
        return set(self._log.read_text().split())


def test_only_the_replica_that_was_lost_is_started_again(tmp_path: Path) -> None:
    trial = Trial(tmp_path, {"0-0": "wait lost", "1-0": "kill", "1-1": "end"}, ranks=2)
    trial.launcher.made_round([0, 1])
    assert trial.launcher.run() == 0
    assert trial.lost[0] == (1, "was killed by SIGKILL")
    assert {"0-0", "1-0"} <= set(trial.started)
    assert {"0-0-0", "0-0-1", "1-0-0"} <= trial.ran
    assert not any(name.startswith("0-1") for name in trial.ran)


def test_a_replica_whose_agent_fails_ends_alone(tmp_path: Path) -> None:
    trial = Trial(tmp_path, {"0-0": "wait lost", "1-0": "end"})
    note = trial.launcher.started

    def start(replica: ReplicaWorld, pids: list[int]) -> None:
        if replica.number == 1:
            raise OSError(28, "No space left on device", "/tmp/ranks")
        note(replica, pids)

    trial.launcher.started = start
    assert trial.launcher.run() == 0
    assert trial.launcher.finished == {0}
    reason = "[Errno 28] No space left on device: '/tmp/ranks'"
    assert trial.lost == [(1, f"was lost: its agent found {reason}")]


def test_other_machines_cannot_reach_the_store_of_a_replica(tmp_path: Path) -> None:
    """torch's store knows no token, and would listen at all addresses of the host."""
    found: list[str] = []

    def listening() -> dict[int, str]:
        mine = psutil.Process().net_connections("tcp")
        return {e.laddr.port: e.laddr.ip for e in mine if e.status == psutil.CONN_LISTEN}

    before = listening()  # stores of earlier tests

    def look(replica: ReplicaWorld, pids: list[int]) -> None:
        found.extend(ip for port, ip in listening().items() if port not in before)
        (tmp_path / "go").touch()

    trial = Trial(tmp_path, {"0-0": "wait go"})
    trial.launcher.started = look
    assert trial.launcher.run() == 0
    assert set(found) == {"127.0.0.1"}


def test_a_replica_is_given_up_after_so_many_restarts(tmp_path: Path) -> None:
    plans = {"0-0": "fail", "0-1": "fail", "0-2": "fail"}
    trial = Trial(tmp_path, plans)
    assert trial.launcher.run() == 3
    assert trial.started == ["0-0", "0-1", "0-2"]
    assert {why for _, why in trial.lost} == {"ended with exit code 3"}


def test_who_has_no_part_in_the_last_round_is_ended_when_the_training_is_complete(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(tmp_path, {"0-0": "end", "1-0": "hang"})
    assert trial.launcher.run() == 0
    assert trial.launcher.finished == {0}
    assert "replica 1 was not there at the end" in capfd.readouterr().err


def test_time_for_which_the_launcher_was_suspended_is_no_time_for_replicas(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, {"0-0": "wait both", "1-0": "wait go"})
    clock, started = time.monotonic, set()

    def begin(replica: ReplicaWorld, pids: list[int]) -> None:
        started.add(replica.number)
        if started == {0, 1}:
            trial.launcher.made_round([0, 1])
            (tmp_path / "both").touch()

    trial.launcher.started = begin

    def suspend() -> None:
        while not trial.launcher.finished:
            time.sleep(0.01)
        time.sleep(0.2)  # for several looks
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
        time.sleep(0.2)
        (tmp_path / "go").touch()

    suspending = threading.Thread(target=suspend)
    suspending.start()
    assert trial.launcher.run() == 0
    suspending.join()
    assert trial.launcher.finished == {0, 1}
    assert "replica 1 was not there at the end" not in capfd.readouterr().err


def test_a_replica_is_found_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = ReplicaWorld(2, 4, "127.0.0.1:1", "secret", 3)
    for name, value in replica.environment().items():
        monkeypatch.setenv(name, value)
    assert find_replica() == replica
    for name in replica.environment():
        monkeypatch.delenv(name)
    assert find_replica() is None
