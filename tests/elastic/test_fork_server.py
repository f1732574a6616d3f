"""Ranks that are forked: like those that start by themselves, without their imports."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.elastic import fork_server
from shardwise.elastic.fork_server import ForkServer
from shardwise.elastic.rank import STOP_SIGNALS
from shardwise.elastic.world import PARENT_PID
from tests.programs import shell_environment, start_program
from tests.waiting import wait_until

RANK = """
import json, os, random, signal, sys, threading, time
from pathlib import Path
from shardwise.elastic.fork_server import serve_forks

def prepare():
    with open(Path(sys.argv[0]).with_name("prepared"), "a") as file:
        print(os.getpid(), file=file)
    PREPARE

serve_forks(prepare)
BODY
"""
TELL = """
numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
print(json.dumps({
    "pid": os.getpid(),
    "parent": os.getppid(),
    "group": os.getpgrp(),
    "session": os.getsid(0),
    "environment": dict(os.environ),
    "arguments": sys.argv[1:],
    "random": [random.random(), numpy and numpy.random.random(), torch and torch.initial_seed()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": [os.readlink(link) for link in links if os.path.lexists(link)],
    "buffers": not sys.stdout.line_buffering,
}))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


class Forks:
    """A fork server, and the ranks that it has forked."""

    def __init__(self, folder: Path, prepare: str, body: str) -> None:
        self.folder = folder
        text = RANK.replace("PREPARE", textwrap.indent(prepare, "    ").strip())
        (folder / "rank.py").write_text(text.replace("BODY", body))
        self.server = ForkServer([sys.executable, str(folder / "rank.py"), "an argument"])
        self.pids: list[int] = []

    def fork(self, is_over: Callable[[], bool] = lambda: False, **changes: str) -> int | None:
        """Fork a rank, whose output goes to files of its number."""
        number = len(self.pids)
        own = {PARENT_PID: str(os.getpid()), "OMP_NUM_THREADS": self.threads}
        with (
            (self.folder / f"stdout-{number}").open("w") as out,
            (self.folder / f"stderr-{number}").open("w") as err,
        ):
            files = [out.fileno(), err.fileno()]
            pid = self.server.fork({**os.environ, **own, **changes}, files, is_over)
        self.pids += [] if pid is None else [pid]
        return pid

    threads = "1"

    def said(self, number: int = 0) -> dict[str, Any]:
        """Wait until a rank has ended, and return what it has said."""
        _, status = os.waitpid(self.pids[number], 0)
        assert os.waitstatus_to_exitcode(status) == 3
        found: dict[str, Any] = json.loads((self.folder / f"stdout-{number}").read_text())
        return found

    def servers(self) -> list[int]:
        """Return the processes that have imported."""
        return [*map(int, (self.folder / "prepared").read_text().split())]


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Forks]]:
    with contextlib.ExitStack() as held:

        def start(prepare: str = "pass", body: str = TELL, threads: str = "1") -> Forks:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
            started = Forks(tmp_path, prepare, body)
            started.threads = threads
            held.enter_context(started.server.running(1))
            return started

        yield start


def test_a_rank_is_a_child_of_the_launcher_with_what_is_its_own(
    forks: Callable[..., Forks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "to be removed")
    started = forks()
    monkeypatch.delenv("LOCAL_RANK")

    pid = started.fork(RANK="1", SHARDWISE_LOST="rank 0 \udcff")

    said = started.said()
    assert said["pid"] == said["group"] == said["session"] == pid != started.servers()[0]
    assert said["parent"] == os.getpid()
    assert (
        said["environment"] | {"RANK": "1", "SHARDWISE_LOST": "rank 0 \udcff"}
        == (said["environment"])
    )
    assert not said["environment"].keys() & {"LOCAL_RANK", "SHARDWISE_FORK_SERVER"}
    assert said["arguments"] == ["an argument"]
    assert said["blocked"] == sorted(STOP_SIGNALS)
    assert said["buffers"]
    assert not [file for file in said["files"] if file.startswith(("socket", "pipe:[0"))]
    assert (started.folder / "stderr-0").read_text() == "to stderr\n"


def test_ranks_have_random_numbers_of_their_own(forks: Callable[..., Forks]) -> None:
    started = forks(prepare="import numpy, torch; random.seed(1); numpy.random.seed(1)")
    started.fork()
    started.fork()

    first, second = started.said(0)["random"], started.said(1)["random"]

    assert not set(first) & set(second)
    assert random.Random(1).random() not in (*first, *second)
    assert len(started.servers()) == 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_has_ended_or_is_suspended_is_replaced(
    how: signal.Signals, forks: Callable[..., Forks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_ANSWER", 0.2)
    started = forks()
    started.fork()
    os.kill(started.servers()[0], how)

    assert started.fork(lambda: True) is None, "a signal came before there was another"
    started.fork()

    assert started.said(1)["pid"] == started.pids[1]
    assert len(started.servers()) == 2


def test_a_server_that_is_suspended_once_it_has_forked_holds_up_nothing(
    forks: Callable[..., Forks],
) -> None:
    started = forks(prepare="os.waitpid = lambda *_: time.sleep(600)")

    started.fork()

    assert started.said()["pid"] == started.pids[0]


def test_threads_that_end_before_a_fork_do_no_harm(forks: Callable[..., Forks]) -> None:
    assert forks(prepare="import numpy", threads="2").fork() is not None


@pytest.mark.parametrize(
    "prepare",
    [
        "threading.Thread(target=time.sleep, args=[60], daemon=True).start()",
        "global device; device = open('/dev/zero')",
        "raise ImportError('none of the users business')",
        "sys.exit()",
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
    ids=["thread", "device", "error", "exit", "killed"],
)
def test_ranks_start_by_themselves_where_a_fork_is_not_safe(
    prepare: str, forks: Callable[..., Forks], capfd: pytest.CaptureFixture[str]
) -> None:
    started = forks(prepare)

    assert started.fork() is None
    assert started.fork() is None
    assert len(started.servers()) == 1, "imports that are of no use are not made again"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "is_forked"),
    [("MKL_NUM_THREADS", False), ("OMP_NUM_THREADS", False), ("NCCL_SOCKET_IFNAME", True)],
)
def test_variables_that_imports_read_are_as_they_were(
    name: str, is_forked: bool, forks: Callable[..., Forks]
) -> None:
    assert (forks().fork(**{name: "7"}) is not None) is is_forked


def test_a_launcher_that_is_asked_to_stop_waits_for_no_imports(
    forks: Callable[..., Forks],
) -> None:
    started = forks(prepare="time.sleep(600)")

    assert started.fork(lambda: (started.folder / "prepared").exists()) is None
    wait_until(lambda: not psutil.pid_exists(started.servers()[0]))


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    body = "from shardwise.elastic.rank import die_with_parent\n"
    body += f"die_with_parent(int(os.environ['{PARENT_PID}']))\ntime.sleep(600)"
    (tmp_path / "rank.py").write_text(RANK.replace("PREPARE", "pass").replace("BODY", body))
    launcher = """
import os, sys, time
from shardwise.elastic import fork_server
from shardwise.elastic.fork_server import ForkServer
server = ForkServer([sys.executable, "rank.py"])
with server.running(1):
    own = {"SHARDWISE_PARENT_PID": str(os.getpid())}
    print(server.fork(server._environment | own, [2, 2], lambda: False), flush=True)
    time.sleep(600)
"""
    (tmp_path / "launcher.py").write_text(launcher)
    started = start_program(["launcher.py"], folder=tmp_path, env=shell_environment())
    rank = int(started.stdout.readline())
    server = int((tmp_path / "prepared").read_text())

    started.kill()
    started.communicate(timeout=30)

    wait_until(lambda: not any(map(_runs, (rank, server))))


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
