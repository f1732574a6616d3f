"""A job on one host that is restarted after a rank was lost. Over hosts: tests/hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import shell_environment, start_program

RANK = """
import os, signal, sys
from shardwise.base.errors import PeerLostError
from shardwise.base.errors import UserError
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world, job_id

attempt, how = int(sys.argv[1]), sys.argv[2]

def body(world, signals):
    if world.rank == 0:
        print(f"attempt {attempt} of {world.size} ranks", flush=True)
        if how == "saving" and attempt == 0:
            raise UserError("checkpoint of step 4: rank 1 was lost") from PeerLostError("rank 1")
    if world.rank == 1:
        with open(sys.argv[0] + ".jobs", "a") as jobs:
            print(job_id(), file=jobs)
    if world.rank == 1 and (how == "always" or attempt == 0):
        if how == "mistake":
            raise UserError("--steps: found 0")
        if how == "hub":
            from shardwise.app.recipes.text.documents import ConnectionLostError
            raise ConnectionLostError("--data: no hub")
        if how == "zero":
            raise ValueError("found a\\0b")
        os.kill(os.getpid(), signal.SIGKILL)

run_rank(find_world(), body)
"""

PARENT = """
import sys
from shardwise.elastic import agent
from shardwise.elastic.restarts import run_job
agent.SETTLE = 0.1
script, how = sys.argv[1:]
sys.exit(run_job(lambda attempt: [sys.executable, script, str(attempt), how], 2, 2))
"""

FORKED = """
import os, signal, sys
from pathlib import Path
from shardwise.elastic.fork_server import serve_forks
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

here = Path(sys.argv[0]).parent
serve_forks(lambda: (here / f"imported-{os.getpid()}").touch())

def body(world, signals):
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (here / f"rank-{attempt}-{world.rank}-{os.getpid()}").touch()
    if attempt == "0" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

run_rank(find_world(), body)
"""

PARENT_OF_FORKED = """
import sys
from shardwise.elastic import agent
from shardwise.elastic.fork_server import ForkServer
from shardwise.elastic.restarts import run_job
agent.SETTLE = 0.1
sys.exit(run_job(ForkServer([sys.executable, *sys.argv[1:]]), 2, 2))
"""


@pytest.mark.parametrize(
    ("how", "code", "attempts"),
    [
        ("once", 0, 2),
        ("saving", 0, 2),
        ("hub", 0, 2),
        ("zero", 0, 2),
        ("always", 128 + 9, 3),
        ("mistake", 2, 1),
    ],
)
def test_a_job_is_restarted_as_often_as_it_may(
    tmp_path: Path, how: str, code: int, attempts: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "parent.py").write_text(PARENT)
    words = [str(tmp_path / "parent.py"), str(tmp_path / "rank.py"), how]
    ended = start_program(words, folder=tmp_path, env=shell_environment())
    out, err = ended.communicate(timeout=60)
    assert ended.returncode == code, err
    # What rank 0 printed may be cut short by the end of rank 1, but for the attempt that is whole.
    assert err.count("restart    ") == attempts - 1
    jobs = (tmp_path / "rank.py.jobs").read_text().splitlines()
    assert len(jobs[0]) == 32
    assert set(jobs) == {jobs[0]}, "it is the same job, however often it is restarted"
    if how == "hub":
        assert "error: rank 1 of 2 failed:\n--data: no hub\n" in err
    if how == "once":
        assert "attempt 1 of 2 ranks" in out
        assert "rank 1 of 2 was killed by SIGKILL" in err
        assert "restart    1 of 2, from what is saved" in err


@pytest.mark.parametrize("command", ["ForkServer(words)", "lambda attempt: words"])
def test_a_killed_rank_is_noticed_where_the_end_of_processes_is_ignored(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(FORKED)
    ignores = "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    parent = PARENT_OF_FORKED.replace("ForkServer([sys.executable, *sys.argv[1:]])", command)
    words = "words = [sys.executable, *sys.argv[1:]]\n"
    (tmp_path / "parent.py").write_text(ignores + parent.replace("sys.exit", words + "sys.exit"))
    ended = start_program(
        [str(tmp_path / "parent.py"), str(tmp_path / "rank.py")],
        folder=tmp_path,
        env=shell_environment(),
    )
    _, err = ended.communicate(timeout=60)

    assert ended.returncode == 0, err
    assert "rank 1 of 2 was killed by SIGKILL" in err


def test_ranks_that_cannot_start_again_say_why(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = "[sys.executable if attempt == 0 else '/no/python', script"
    parent = PARENT.replace("[sys.executable, script", command)
    shown = "from shardwise.elastic.output import Shown\n"
    parent = shown + parent.replace("2, 2)", "2, 2, shown=Shown('3'))")
    (tmp_path / "parent.py").write_text(parent)
    words = [str(tmp_path / "parent.py"), str(tmp_path / "rank.py"), "once"]
    ended = start_program(words, folder=tmp_path, env=shell_environment())
    _, err = ended.communicate(timeout=60)

    assert ended.returncode != 0
    assert "No such file or directory: '/no/python'" in err.splitlines()[-1]


def test_a_restart_imports_nothing_again(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(FORKED)
    (tmp_path / "parent.py").write_text(PARENT_OF_FORKED)
    words = [str(tmp_path / "parent.py"), str(tmp_path / "rank.py")]
    ended = start_program(words, folder=tmp_path, env=shell_environment())
    _, err = ended.communicate(timeout=60)

    assert ended.returncode == 0, err
    assert len(list(tmp_path.glob("imported-*"))) == 1
    ranks = [file.name.rpartition("-") for file in tmp_path.glob("rank-*")]
    assert {name for name, _, _ in ranks} >= {"rank-0-1", "rank-1-0", "rank-1-1"}
    assert len({pid for _, _, pid in ranks}) == len(ranks)
