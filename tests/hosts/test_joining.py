"""Jobs that a host joins, leaves, and is lost from.

The rules of joining are tested in ``tests/elastic/test_joining.py``; here are commands as their
users start them, without torch and with it.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks._hosts import Host, two_hosts
from shardwise.runs.metrics_file import read_metrics
from tests.hosts.network import needs_hosts, start
from tests.programs import Program
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.small import losses, small_config, write_model

pytestmark = needs_hosts

Pair = tuple[Host, Host]
WAIT = 120.0  # seconds that anything may take on a busy machine
PORT = 29413

RANK = """
import signal, sys, time
from pathlib import Path
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import run_rank
from shardwise.elastic.world import find_world

here, attempt = Path(sys.argv[1]), sys.argv[2]

def body(world, signals):
    stop = here / f"stop {attempt}"  # what ranks exchange at every step
    with signals.deferred():
        signals.stepped()
        (here / f"round {attempt}: rank {world.rank} of {world.size}").touch()
        while not (signals.noted or stop.exists()):
            time.sleep(0.02)
    stop.touch()
    (here / f"saved {attempt}: rank {world.rank}").touch()
    raise Stopped(signals.noted or signal.SIGTERM, f"Stopped in round {attempt}.")

run_rank(find_world(), body)
"""

JOB = """
import sys
from dataclasses import replace
from shardwise.elastic import membership, rendezvous, restarts
from shardwise.base.errors import UserError
from shardwise.elastic.hosts import Nodes

rendezvous._GUIDING, membership.LAST_CALL = 0.2, 0.2
script, folder, rank, lr = sys.argv[1:]
nodes = Nodes.of("1:2", None if rank == "none" else int(rank), "10.77.0.1:29413", 60.0)

def command(attempt):
    return [sys.executable, script, folder, str(attempt)]

try:
    sys.exit(restarts.run_job(command, 1, 1, replace(nodes, options={"--lr": lr})))
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""

# The command itself, except for the time that it waits for more hosts.
TRAIN = """
from shardwise.app.cli.main import app
from shardwise.elastic import membership

membership.LAST_CALL = 0.2
app()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Pair]:
    with two_hosts() as pair:
        yield pair


def wait_for(condition: Callable[[], object], job: Program) -> None:
    """Wait until a condition holds, which must be before host 0 ends."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "this never happened"
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)


def kill(command: Program) -> None:
    """Kill a launcher and its ranks, as when a host is lost."""
    parent = psutil.Process(command.pid)
    for process in [parent, *parent.children(recursive=True)]:  # it might report its ranks
        process.kill()
    command.communicate()


def test_a_host_joins_is_lost_and_comes_back(hosts: Pair, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (tmp_path / "job.py").write_text(JOB)

    def come(place: int, rank: str, lr: str = "0.1") -> Program:
        env = {"PYTHONPATH": str(tmp_path)}
        return start(hosts[place], "job", str(script), str(seen), rank, lr, env=env)

    def has_begun(attempt: int, size: int) -> bool:
        return all((seen / f"round {attempt}: rank {r} of {size}").exists() for r in range(size))

    first = come(0, "0")
    wait_for(lambda: has_begun(0, 1), first)
    other = come(1, "none", lr="0.2")
    _, told = other.communicate(timeout=WAIT)
    assert (other.returncode, told) == (
        2,
        "error: --lr: found 0.2, expected 0.1, as host 0 has\n",
    )
    second = come(1, "none")
    wait_for(lambda: has_begun(1, 2), first)
    assert (seen / "saved 0: rank 0").exists()
    kill(second)
    wait_for(lambda: has_begun(2, 1), first)
    again = come(1, "none")
    wait_for(lambda: has_begun(3, 2), first)
    assert (seen / "saved 2: rank 0").exists()
    again.send_signal(signal.SIGTERM)
    _, told = again.communicate(timeout=WAIT)
    # It may be among the others before it has seen that they save first.
    first_line = "hosts      the other hosts finish a step, and continue with this host"
    lines = [line for line in told.splitlines() if line != first_line]
    assert (again.returncode, lines) == (
        128 + signal.SIGTERM,
        [
            "hosts      2 hosts; rank 1 of 2 here",
            "hosts      this host leaves; the job continues without it",
        ],
    )
    wait_for(lambda: has_begun(4, 1), first)
    first.send_signal(signal.SIGTERM)
    _, told = first.communicate(timeout=WAIT)
    joins = [
        "hosts      host 1 (10.77.0.2) joins; finishing a step, to continue with 2 hosts",
        "hosts      continuing with 2 hosts",
        "hosts      2 hosts; rank 0 of 2 here",
    ]
    lost = "host 1 (10.77.0.2) was lost: the connection was closed; continuing with 1 host"
    alone = "hosts      1 host; rank 0 of 1 here"
    left = "hosts      host 1 (10.77.0.2) left; continuing with 1 host"
    assert told.splitlines() == [
        *(alone, *joins, f"restart    {lost}"),
        *(alone, *joins, left),
        *(alone, "Stopped in round 4."),
    ]
    assert first.returncode == 128 + signal.SIGTERM


class Training:
    """A training on host 0, which others may join.

    Args:
        hosts: where.
        folder: of the job.
        port: where the hosts meet.
        options: of ``train lm``, beside those that all have here.
    """

    def __init__(self, hosts: Pair, folder: Path, port: int, options: str) -> None:
        write_model(folder, attention_dropout=0.0)
        write_jsonl(folder / "corpus.jsonl", texts(300))
        (folder / "training.py").write_text(TRAIN)
        self._hosts, self._folder = hosts, folder
        self._options = (
            "train lm --model config.json --data corpus.jsonl --seq-length 16 --steps 1000000 "
            "--batch-size 2 --lr 0.01 --warmup 2 --eval-every 0 --device cpu --sample-tokens 0 "
            f"--nproc 1 --out job --max-restarts 1 --nnodes 1:2 --rdzv 10.77.0.1:{port} {options}"
        ).split()
        self._env = {"PYTHONPATH": str(folder)}
        self.config = small_config(folder, "job")
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.first = self._start(0, "--node-rank", "0", out=out, err=err)

    def _start(self, at: int, *more: str, **files: Any) -> Program:
        words = [*self._options, *more]
        where = self._hosts[at]
        return start(where, "training", *words, folder=self._folder, env=self._env, **files)

    def come(self) -> Program:
        """Start the command on host 1."""
        return self._start(1)

    @property
    def steps(self) -> int:
        """How many have been made."""
        metrics = self.config.files.metrics
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """What the run says of each world that it was in."""
        found: list[dict[str, Any]] = self.config.files.read()["sessions"]
        return found

    def wait_for_session(self, count: int, steps: int) -> None:
        """Wait until this is the n-th session, and has completed so many steps."""
        wait_for(lambda: self.steps and len(self.sessions) == count, self.first)
        wait_for(lambda: self.steps >= self.sessions[-1]["from_step"] + steps, self.first)

    @property
    def told(self) -> str:
        """What host 0 has told so far."""
        return (self._folder / "err").read_text()

    @property
    def said(self) -> str:
        """What host 0 has shown so far."""
        return (self._folder / "out").read_text()

    def stop(self) -> None:
        """Stop the job by Ctrl-C on host 0."""
        self.first.send_signal(signal.SIGINT)
        self.first.wait(timeout=WAIT)
        assert self.first.returncode == 128 + signal.SIGINT, self.told

    def assert_goes_on_at(self, *steps: int) -> None:
        """No step is missing or made twice, and the loss goes on from where it was at these."""
        history = losses(self.config)
        assert [step for step, _, _ in history] == list(range(1, len(history) + 1))
        by_step = {step: loss for step, loss, _ in history}
        for at in steps:
            before = statistics.mean(by_step[step] for step in range(at - 19, at + 1))
            after = statistics.mean(by_step[step] for step in range(at + 1, at + 21))
            assert abs(after - before) < 0.3 * by_step[1], (at, before, after)


def test_diloco_goes_on_with_a_host_that_joins_and_without_it(hosts: Pair, tmp_path: Path) -> None:
    options = "--strategy diloco --local-steps 7 --checkpoint-every 25"
    job = Training(hosts, tmp_path, PORT, options)
    job.wait_for_session(1, 22)
    alone = read_metrics(job.config.files.metrics)[:22]
    second = job.come()
    job.wait_for_session(2, 30)
    kill(second)
    # More steps than between checkpoints: those that are repeated do not count.
    job.wait_for_session(3, 50)
    job.stop()
    assert "host 1 (10.77.0.2) joins; finishing a step, to continue with 2 hosts" in job.told
    assert "host 1 (10.77.0.2) was lost" in job.told
    assert [(s["world_size"], s["hosts"]) for s in job.sessions] == [(1, 1), (2, 2), (1, 1)]
    joined, left = job.sessions[1]["from_step"], job.sessions[2]["from_step"]
    # What was saved is neither lost nor trained again; what was not saved is trained again.
    assert f"checkpoint step={joined} " in job.said
    assert read_metrics(job.config.files.metrics)[:22] == alone
    assert joined < left
    assert left % 25 == 0
    job.assert_goes_on_at(joined, left)


def test_ranks_stay_when_a_host_joins_and_when_it_leaves(hosts: Pair, tmp_path: Path) -> None:
    job = Training(hosts, tmp_path, PORT + 1, "--checkpoint-every 0")
    job.wait_for_session(1, 22)
    [rank] = psutil.Process(job.first.pid).children()
    second = job.come()
    job.wait_for_session(2, 22)
    assert rank.is_running()
    assert not job.config.files.checkpoints.exists(), "nothing was saved"
    second.send_signal(signal.SIGTERM)
    second.wait(timeout=WAIT)
    job.wait_for_session(3, 22)
    assert rank.is_running()
    assert f"checkpoint step={job.sessions[2]['from_step']} " in job.said, "those that leave save"
    job.stop()
    assert [session["world_size"] for session in job.sessions] == [1, 2, 1]
    job.assert_goes_on_at(*(session["from_step"] for session in job.sessions[1:]))


@pytest.mark.parametrize(
    "moment",
    [
        "continuing",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("joins", "2 hosts; rank")),
    ],
)
def test_what_ranks_hold_in_memory_is_saved_when_a_signal_stops_them_meanwhile(
    hosts: Pair, tmp_path: Path, moment: str
) -> None:
    job = Training(hosts, tmp_path, PORT + 2, "--checkpoint-every 0")
    job.wait_for_session(1, 5)
    second = job.come()
    wait_for(lambda: moment in job.told, job.first)
    job.stop()
    second.wait(timeout=WAIT)
    [saved] = job.config.files.checkpoints.iterdir()
    assert saved.name == f"step-{job.steps:08}"
    assert job.steps > job.sessions[-1]["from_step"]
