"""Local ranks: started together, ended together, nothing left running.

The ranks here are small scripts without torch, so that each test takes a fraction of a second.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shardwise.elastic.agent import Agent, LocalRank, Signals, agents_environment
from shardwise.elastic.hosts import HERE
from shardwise.elastic.output import RankOutput
from shardwise.elastic.rendezvous import Order, Rendezvous
from tests.programs import start_program
from tests.waiting import wait_until

WAIT = 30.0  # seconds that anything may take on a busy machine

RANK = """
import os, signal, sys, time
from pathlib import Path
from shardwise.base.errors import PeerLostError
from shardwise.base.errors import UserError
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

here = Path(sys.argv[1])

def body(world, signals):
    (here / f"pid-{world.rank}").write_text(str(os.getpid()))
    def everyone(name):
        (here / f"{name}-{world.rank}").touch()
        while len(list(here.glob(f"{name}-*"))) < world.size:
            time.sleep(0.01)
    def wait_until_dead(rank):
        pid = (here / f"pid-{rank}").read_text()
        while Path(f"/proc/{pid}").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.01)
    def sleep():
        while True:
            time.sleep(0.05)
    everyone("ready")
    BODY

run_rank(find_world(), body)
"""

PARENT = """
import os, sys, time
from shardwise.elastic import agent, starting
from shardwise.elastic.restarts import run_job
script, folder, nproc, settle = sys.argv[1:]
agent.SETTLE, agent.SECONDARY = float(settle), WAIT
starting.PATIENCE = float(os.environ.get("PATIENCE", "60"))
if seconds := float(os.environ.get("LATE", "0")):
    made = agent.LocalRank
    agent.LocalRank = lambda *words: time.sleep(seconds) or made(*words)
sys.exit(run_job(lambda attempt: [sys.executable, script, folder], int(nproc), 0))
"""


class Run:
    """A launcher whose ranks run a body that the test gives."""

    def __init__(
        self, folder: Path, nproc: int, body: str, settle: float, env: dict[str, str]
    ) -> None:
        self.folder, self.nproc = folder, nproc
        indented = textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()
        (folder / "rank.py").write_text(RANK.replace("BODY", indented))
        (folder / "parent.py").write_text(PARENT.replace("WAIT", str(WAIT)))
        (folder / "ranks").mkdir()
        words = ["parent.py", "rank.py", "ranks", str(nproc), str(settle)]
        self.parent = start_program(words, folder=folder, env={**_clean_environment(), **env})

    def wait_until_ready(self) -> None:
        """Wait until every rank runs its body."""
        wait_until(lambda: len(list(self.folder.glob("ranks/ready-*"))) == self.nproc)

    def end(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr; nothing may be left running."""
        out, err = self.parent.communicate(timeout=WAIT)
        assert self.alive() == [], "ranks outlived their launcher"
        return self.parent.returncode, out, err

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that have started."""
        return [int(file.read_text()) for file in sorted(self.folder.glob("ranks/pid-*"))]

    def alive(self) -> list[int]:
        """Return those that are running (a zombie is not)."""
        return [pid for pid in self.pids() if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _clean_environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return {k: v for k, v in os.environ.items() if k not in names}


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Run]:
    def start(nproc: int, body: str, settle: float = 0.1, **env: str) -> Run:
        run = Run(tmp_path, nproc, body, settle, env)
        runs.append(run)
        return run

    runs: list[Run] = []
    yield start
    for run in runs:
        run.parent.kill()
        run.parent.close()
        run.parent.wait(WAIT)


def test_ranks_find_torchs_variables_and_what_the_user_chose(launch: Callable[..., Run]) -> None:
    body = """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert int(os.environ["MASTER_PORT"]) > 0
    found = " ".join(os.environ[name] for name in (*names, "OMP_NUM_THREADS"))
    (here / f"env-{world.rank}").write_text(found)
    print(f"rank {world.rank} of {world.size}")
    """
    run = launch(2, body, OMP_NUM_THREADS="7")
    assert run.end() == (0, "rank 0 of 2\n", "")
    found = [(run.folder / "ranks" / f"env-{rank}").read_text() for rank in range(2)]
    assert found == ["0 2 0 2 127.0.0.1 7", "1 2 1 2 127.0.0.1 7"]


def test_cores_are_shared_out_as_threads(launch: Callable[..., Run]) -> None:
    cores = len(os.sched_getaffinity(0))
    run = launch(cores * 2, "print(os.environ['OMP_NUM_THREADS'])")
    assert run.end()[:2] == (0, "1\n")


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (
            "if world.rank == 1: raise RuntimeError('the reason')\nsleep()",
            1,
            "error: rank 1 of 3 failed:\nTraceback .*\nRuntimeError: the reason\n",
        ),
        ("raise UserError('--steps: found 0')", 2, "error: --steps: found 0\n"),
        (
            "if world.rank == 1: os._exit(7)\nsleep()",
            7,
            "error: rank 1 of 3 ended with exit code 7\n",
        ),
        (
            "if world.rank == 1:\n"
            "    print('last words', flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "sleep()",
            128 + signal.SIGKILL,
            "last words\nerror: rank 1 of 3 was killed by SIGKILL "
            r"\(the system may have run out of memory\)\n",
        ),
    ],
    ids=["raises", "refuses", "leaves", "is killed"],
)
def test_a_rank_that_fails_ends_all_and_is_named_once(
    launch: Callable[..., Run], body: str, code: int, told: str
) -> None:
    *ended, err = launch(3, body).end()
    assert ended == [code, ""]
    assert re.fullmatch(told, err, re.DOTALL), err


def test_what_a_rank_reports_before_its_launcher_looks_is_read(launch: Callable[..., Run]) -> None:
    run = launch(1, "raise UserError('--steps: found 0, expected 1 or more')", LATE="1")
    assert run.end() == (2, "", "error: --steps: found 0, expected 1 or more\n")


@pytest.mark.parametrize("settle", [WAIT, 0.0])
def test_the_cause_is_waited_for_longer_than_what_follows_from_it(
    launch: Callable[..., Run], settle: float
) -> None:
    # Rank 0 loses its peer, and says so before rank 1, which is the cause.
    body = """
    if world.rank == 0:
        raise PeerLostError("Connection closed by peer")
    wait_until_dead(0)
    time.sleep(0.3)
    raise ValueError("the cause")
    """
    code, _, err = launch(2, body, settle).end()
    assert (code, err.splitlines()[0]) == (1, "error: rank 1 of 2 failed:")
    assert "the cause" in err
    assert "closed by peer" not in err


@pytest.mark.parametrize(
    "error",
    ["RuntimeError('gloo: connection closed by peer')", "ConnectionResetError('by a data server')"],
)
def test_an_error_that_only_speaks_of_peers_is_an_error_of_its_own(
    launch: Callable[..., Run], error: str
) -> None:
    body = f"if world.rank == 1:\n    raise {error}\nwait_until_dead(1)\nraise ValueError('later')"
    code, _, err = launch(2, body, settle=WAIT).end()
    assert (code, err.splitlines()[0]) == (1, "error: rank 1 of 2 failed:")
    assert "later" not in err


def test_what_was_raised_from_a_lost_peer_is_secondary_too(launch: Callable[..., Run]) -> None:
    body = """
    if world.rank == 0:
        raise UserError("checkpoint of step 4: rank 1 was lost") from PeerLostError("rank 1")
    wait_until_dead(0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    code, _, err = launch(2, body, settle=WAIT).end()
    assert code == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert "checkpoint of step 4" not in err


def test_others_are_stopped_at_once_even_if_they_ignore_signals(
    launch: Callable[..., Run],
) -> None:
    body = """
    if world.rank == 0:
        raise ValueError()
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    sleep()
    """
    assert launch(2, body).end()[0] == 1


STOPPABLE = """
with signals.deferred():
    (here / f"waiting-{world.rank}").touch()
    while not signals.noted:
        time.sleep(0.01)
(here / f"saved-{world.rank}").touch()
raise Stopped(signals.noted, f"saved by rank {world.rank}")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_and_lets_it_save(
    launch: Callable[..., Run], signum: signal.Signals
) -> None:
    run = launch(2, STOPPABLE)
    wait_until(lambda: len(list(run.folder.glob("ranks/waiting-*"))) == 2)
    run.parent.send_signal(signum)
    assert run.end() == (128 + signum, "", "saved by rank 0\n")
    assert len(list(run.folder.glob("ranks/saved-*"))) == 2


def test_a_second_signal_kills(launch: Callable[..., Run]) -> None:
    run = launch(2, "with signals.deferred():\n    (here / f'up-{world.rank}').touch(); sleep()")
    wait_until(lambda: len(list(run.folder.glob("ranks/up-*"))) == 2)
    run.parent.send_signal(signal.SIGINT)
    time.sleep(0.7)  # at once it would count as the same Ctrl-C
    run.parent.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 128 + signal.SIGINT
    assert err == "Stopped at once by SIGINT; what was not saved is lost.\n"


def test_ranks_have_their_time_to_save_after_their_launcher_was_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = Signals()
    stops.close()
    agent = Agent(lambda _: ["none"], Rendezvous(HERE, 2, 0), stops)
    programs = []
    for rank, script in enumerate(("echo; exec sleep 60", "trap '' TERM; echo; exec sleep 60")):
        program = subprocess.Popen(
            ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        assert program.stdout is not None
        program.stdout.readline()  # it is ready
        programs.append(program)
        folder = tmp_path / str(rank)
        folder.mkdir()
        agent.ranks.append(LocalRank(rank, program.pid, folder, RankOutput(rank, folder, [])))
    stops.noted.append(signal.SIGTERM)
    deadline = time.monotonic() + WAIT
    while agent.ranks[0].code is None:
        assert agent._watch(Order.CONTINUE) is None
        assert time.monotonic() < deadline
    assert agent._watch(Order.CONTINUE) is None
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600.0)
    assert agent._watch(Order.CONTINUE) is None, "no time has passed for it"
    agent._kill_ranks()
    agent._folder.cleanup()
    for rank, program in zip(agent.ranks, programs, strict=True):
        rank.close()
        program.communicate()


def test_a_signal_before_ranks_start_speaks_of_no_other_hosts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stops = Signals()
    stops.close()
    stops.noted.append(signal.SIGTERM)
    meeting = Rendezvous(HERE, 1, 0, stopped=lambda: True)
    with agents_environment():
        assert Agent(lambda _: ["none"], meeting, stops).run_job() == 143
    assert capfd.readouterr().err == "Stopped while waiting for ranks to start.\n"


def test_a_signal_before_training_stops_without_a_traceback(launch: Callable[..., Run]) -> None:
    run = launch(2, "sleep()")
    run.wait_until_ready()
    run.parent.send_signal(signal.SIGTERM)
    code, out, err = run.end()
    assert (code, out) == (128 + signal.SIGTERM, "")
    assert err == "Stopped by SIGTERM; there was nothing to save.\n"


def test_a_failure_while_stopping_is_shown(launch: Callable[..., Run]) -> None:
    body = """
    with signals.deferred():
        (here / f"waiting-{world.rank}").touch()
        while not signals.noted:
            time.sleep(0.01)
    if world.rank == 1:
        raise OSError("the disk is full")
    sleep()
    """
    run = launch(2, body)
    wait_until(lambda: len(list(run.folder.glob("ranks/waiting-*"))) == 2)
    run.parent.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 1
    assert "the disk is full" in err


def test_ranks_die_with_a_launcher_that_is_killed(launch: Callable[..., Run]) -> None:
    run = launch(3, "signal.signal(signal.SIGTERM, signal.SIG_IGN); sleep()")
    run.wait_until_ready()
    assert len(run.alive()) == 3
    run.parent.kill()
    run.parent.wait(WAIT)
    wait_until(lambda: not run.alive())


def test_ranks_meet_at_a_store_that_needs_no_fixed_port(launch: Callable[..., Run]) -> None:
    body = """
    import torch, torch.distributed as dist
    from shardwise.elastic.connect import connected
    with connected(world, "gloo"):
        ones = torch.ones(())
        dist.all_reduce(ones)
    if world.rank == 0:
        print(ones.item())
    """
    assert launch(2, body, OMP_NUM_THREADS="1").end() == (0, "2.0\n", "")


def test_ranks_that_take_long_to_start_are_shown_where_they_are(launch: Callable[..., Run]) -> None:
    body = """
    def wait_for_the_test():
        while not (here / "told").exists():
            time.sleep(0.01)
    wait_for_the_test()
    """
    run = launch(2, body, PATIENCE="0.2")
    assert run.parent.stderr is not None
    told: set[str] = set()
    while told != {"0", "1"}:
        line = run.parent.stderr.readline()
        assert line.startswith("starting   no step for "), line
        if "in wait_for_the_test (rank.py:" in line:
            told |= set(line.partition(" in ")[0].partition("rank")[2].strip("s ").split(", "))
    (run.folder / "ranks" / "told").touch()
    assert run.end()[0] == 0
