"""Jobs over hosts: started, restarted with the hosts that remain, ended.

Ranks are small scripts without torch: it does not matter what they do. What a training makes of it,
and of a host that is paused, is in ``test_trainings.py``; a link is cut in
``test_losing_host_0.py``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks._hosts import Host, two_hosts
from tests.hosts.network import left_on, needs_hosts, start

pytestmark = needs_hosts

Pair = tuple[Host, Host]
WAIT = 60.0  # seconds that anything may take on a busy machine

RANK = """
import sys, time
from pathlib import Path
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

here, attempt = Path(sys.argv[1]), sys.argv[2]

def body(world, signals):
    (here / f"round {attempt}: rank {world.rank} of {world.size}").touch()
    while not (here / f"end-{attempt}").exists():
        time.sleep(0.02)

run_rank(find_world(), body)
"""

JOB = """
import sys
from shardwise.elastic import membership, rendezvous, restarts
from shardwise.base.errors import UserError
from shardwise.elastic.hosts import Nodes

rendezvous.SILENCE, membership.STOP_GRACE = 4.0, 1.0
script, folder, count, rank, timeout = sys.argv[1:]
nodes = Nodes.of(int(count), int(rank), "10.77.0.1:29412", float(timeout))

def command(attempt):
    return [sys.executable, script, folder, str(attempt)]

try:
    sys.exit(restarts.run_job(command, 1, 1, nodes))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with two_hosts() as pair:
        yield pair


class Job:
    """A job of one rank on each host; the second attempt ends as soon as it has started."""

    def __init__(self, hosts: Pair, folder: Path, *ranks: int, timeout: float = WAIT) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "rank.py").write_text(RANK)
        (folder / "job.py").write_text(JOB)
        (folder / "seen").mkdir()
        (folder / "seen" / "end-1").touch()
        arguments = [str(folder / "rank.py"), str(folder / "seen"), "2"]
        env = {"PYTHONPATH": str(folder)}
        self.parents = [
            start(hosts[min(rank, 1)], "job", *arguments, str(rank), str(timeout), env=env)
            for rank in ranks
        ]

    def seen(self) -> set[str]:
        """Return which ranks have started."""
        return {path.name for path in (self.folder / "seen").glob("round *")}

    def wait_for(self, *expected: str) -> None:
        """Wait until ranks have started."""
        deadline = time.monotonic() + WAIT
        while not set(expected) <= self.seen():
            assert time.monotonic() < deadline, f"found {self.seen()}"
            assert any(p.poll() is None for p in self.parents), self.end()
            time.sleep(0.02)

    def processes(self, place: int) -> list[psutil.Process]:
        """Return the launcher of a host and its ranks."""
        parent = psutil.Process(self.parents[place].pid)
        return [parent, *parent.children(recursive=True)]

    def end(self) -> list[tuple[int, str]]:
        """Return exit code and stderr of every launcher; nothing may be left on the hosts."""
        ended = self.results()
        assert not left_on(*self.hosts), "ranks outlived their launcher"
        return ended

    def results(self) -> list[tuple[int, str]]:
        """Return exit code and stderr of every launcher."""
        ended = []
        for parent in self.parents:
            _, err = parent.communicate(timeout=WAIT)
            ended.append((parent.wait(), err))
        return ended


FIRST = ("round 0: rank 0 of 2", "round 0: rank 1 of 2")
BOTH, ALONE = ("round 1: rank 0 of 2", "round 1: rank 1 of 2"), ("round 1: rank 0 of 1",)


def test_a_rank_that_is_killed_brings_all_hosts_back(hosts: Pair, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, 0, 1)
    job.wait_for(*FIRST)
    job.processes(1)[-1].kill()
    job.wait_for(*BOTH)
    for code, err in job.end():
        assert code == 0, err
        assert "a rank of host 1 (10.77.0.2) failed; continuing with 2 hosts" in err
    assert job.seen() == {*FIRST, *BOTH}


def test_a_host_that_is_killed_is_named_and_the_others_go_on(hosts: Pair, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, 0, 1)
    job.wait_for(*FIRST)
    for process in job.processes(1):
        process.kill()
    job.wait_for(*ALONE)
    [(code, err), _] = job.end()
    assert code == 0
    assert "host 1 (10.77.0.2) was lost: the connection was closed" in err
    assert "continuing with 1 host" in err


def test_ctrl_c_on_one_host_stops_all_and_is_no_reason_to_begin_again(
    hosts: Pair, tmp_path: Path
) -> None:
    job = Job(hosts, tmp_path, 0, 1)
    job.wait_for(*FIRST)
    job.parents[1].send_signal(signal.SIGINT)  # before a step: host 0 waits for its rank in vain
    [(code, err), (other_code, other)] = job.end()
    assert (code, other_code) == (1, 128 + signal.SIGINT)
    assert "host 1 (10.77.0.2) was stopped" in err
    assert "Stopped by SIGINT" in other
    assert job.seen() == set(FIRST)


def test_without_host_0_the_others_go_on(hosts: Pair, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, 0, 1)
    job.wait_for(*FIRST)
    for process in job.processes(0):
        process.kill()
    job.wait_for(*ALONE)
    [_, (code, err)] = job.end()
    assert code == 0
    lost = "host 0 (10.77.0.1) was lost: the connection was closed; continuing with 1 host"
    assert lost in err


def test_hosts_that_do_not_fit_together_are_refused(hosts: Pair, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("on-time", "late")]
    for folder in folders:
        folder.mkdir()
    job = Job(hosts, folders[0], 0, 1)
    job.wait_for(*FIRST)
    late = Job(hosts, folders[1], 1)
    [(code, err)] = late.results()
    assert code == 2
    assert "has started without this host" in err
    (job.folder / "seen" / "end-0").touch()
    assert job.end() == [(0, ""), (0, "")]


def test_a_host_that_never_comes_is_named(hosts: Pair, tmp_path: Path) -> None:
    [(code, err)] = Job(hosts, tmp_path, 0, timeout=0.5).end()
    assert code == 2
    assert "--rdzv: found hosts [0] within 0 s, expected [1] too" in err
