"""Training over hosts that go and come, and while strangers call: the losses are those of one host.

All jobs run at once, as in ``test_trainings.py``. Every step has twelve sequences, which two hosts
and three can share.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._hosts import switched_hosts, two_hosts
from tests.harness import run_ranks
from tests.hosts.jobs import IMPATIENT, WAIT, Ended, Job, kill_host_0, started
from tests.hosts.network import needs_hosts, start
from tests.hosts.test_trainings import (
    EVERY,
    FAULT,
    GBIT,
    LM,
    OVER_HOSTS,
    Losses,
    assert_same_losses,
    sessions_of,
)
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.running import train
from tests.recipes.small import losses, small_config, write_model

pytestmark = needs_hosts

Jobs = Mapping[str, Future[Ended]]

STEPS = 24
STRANGERS = 10_000
TOKEN = {"SHARDWISE_RDZV_TOKEN": "a token that strangers do not have"}
OPTIONS = f"{LM} --steps {STEPS} --nproc 1 {OVER_HOSTS}".replace(
    "--batch-tokens 128", "--batch-tokens 192 --streams 12"
)

# What every process of some jobs runs first: training waits as long as a file is there, after some
# steps, so that what the test does comes before its end on a busy machine, too.
HOLDING = """
import os
import time
from pathlib import Path

from shardwise.elastic.rank import StopSignals

hold, free = Path(os.environ["HOLD"]), int(os.environ["FREE_STEPS"])
stepped = StopSignals.stepped

def held(self):
    global free
    stepped(self)
    free -= 1
    while free < 0 and hold.exists():
        time.sleep(0.02)

StopSignals.stepped = held
"""


@contextlib.contextmanager
def held(hold: Path) -> Iterator[None]:
    """Let a job wait."""
    hold.touch()
    yield
    hold.unlink()


def without_host_0(folder: Path, name: str) -> Ended:
    """Train over three hosts, and kill host 0."""
    options = f"{OPTIONS} --max-restarts 1 --out {name}".replace("--nnodes 2", "--nnodes 3")
    with switched_hosts(3, GBIT) as hosts, Job(hosts, folder, name, "shardwise", options) as job:
        return job.disturb(FAULT, kill_host_0, witness=1)


def replaced(folder: Path, name: str) -> Ended:
    """Train over two hosts, and replace both: a new one joins before an old one leaves."""
    options = f"{OPTIONS} --auto-resume --out {name}".replace("--nnodes 2", "--nnodes 2:3")
    hold = folder / "replaced.hold"
    env = {"PYTHONPATH": str(folder), "HOLD": str(hold), "FREE_STEPS": "0"}
    with (
        switched_hosts(3, GBIT) as hosts,
        Job(hosts[:2], folder, name, "training", options, env) as job,
    ):
        job.wait_for_step(2)
        with held(hold):
            job.start(hosts[2], "2")
            job.wait_until_told(2, "finish a step")
        job.wait_until_told(2, "hosts      3 hosts")
        job.wait_for_step(job.steps() + 2)
        job.commands[0].send_signal(signal.SIGTERM)
        job.wait_until_told(2, "hosts      2 hosts")
        job.wait_for_step(job.steps() + 2)
        with held(hold):
            job.start(hosts[0], "0")  # with the command of the one that has left
            job.wait_until_told(3, "finish a step")
        job.wait_until_told(3, "hosts      3 hosts")
        job.wait_for_step(job.steps() + 2)
        job.commands[1].send_signal(signal.SIGTERM)
        return job.end()


def flooded(folder: Path, name: str) -> Ended:
    """Train while strangers call at the port where the hosts meet; they are on host 0."""
    options = f"{OPTIONS} --out {name}"
    hold = folder / "flooded.hold"
    last = {"PYTHONPATH": str(folder), "HOLD": str(hold), "FREE_STEPS": str(STEPS - 5)}
    with (
        two_hosts(GBIT) as hosts,
        Job(hosts, folder, name, "shardwise", options, {**TOKEN, **last}) as job,
    ):
        with held(hold):
            job.wait_for_step(1)
            where = ("10.77.0.1", "29412", str(STRANGERS))
            strangers = start(hosts[0], "tests.hosts.flood", *where, env=TOKEN)
            out, err = strangers.communicate(timeout=WAIT)
        return replace(job.end(), said=out + err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the data and the results of all jobs."""
    folder = tmp_path_factory.mktemp("trainings")
    write_model(folder, attention_dropout=0.0)
    write_jsonl(folder / "corpus.jsonl", texts(300))
    (folder / "training.py").write_text(IMPATIENT)
    (folder / "sitecustomize.py").write_text(HOLDING)
    return folder


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, folder: Path) -> Iterator[Jobs]:
    """The jobs, running."""
    every = {"zero": without_host_0, "replaced": replaced, "flooded": flooded}
    with ThreadPoolExecutor() as pool:
        yield started(request, pool, every, {"zero"}, folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, jobs: Jobs) -> Losses:
    """The losses of one process."""
    del jobs  # which have begun
    one = small_config(folder, "one-process", steps=STEPS, batch_size=12, checkpoint_every=0)
    one = replace(one, data=(str(folder / "corpus.jsonl"),), streams=12)
    run_ranks(train, 1, one, timeout=WAIT)
    return losses(one)


@pytest.mark.long
def test_a_killed_host_0_is_named_and_the_others_train_on(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["zero"].result()
    print(f"named after {ended.named:.1f} s")
    for code, told in zip(ended.codes[1:], ended.told[1:], strict=True):
        assert code == 0, told
        assert "host 0 (10.77.0.1) was lost: the connection was closed" in told
        assert "continuing with 2 hosts" in told
    first, second = sessions_of(folder, "zero")
    assert (first["hosts"], second["hosts"]) == (3, 2)
    assert second["from_step"] in range(FAULT // EVERY * EVERY, STEPS, EVERY)
    assert_same_losses(folder, "zero", undisturbed)
    assert ended.left == []


def test_every_host_is_replaced_and_no_step_is_lost(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["replaced"].result()
    assert ended.codes == [128 + signal.SIGTERM, 128 + signal.SIGTERM, 0, 0], ended.told
    assert [session["hosts"] for session in sessions_of(folder, "replaced")] == [2, 3, 2, 3, 2]
    assert "restart" not in "".join(ended.told)
    assert "step=" in (folder / "replaced-1.out").read_text(), "rank 0 was there after host 0 left"
    assert_same_losses(folder, "replaced", undisturbed)
    assert ended.left == []


def test_strangers_at_the_port_change_nothing(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["flooded"].result()
    assert ended.codes == [0, 0], ended.told
    assert "lost" not in "".join(ended.told)
    assert ended.said == f"{STRANGERS} strangers; what was recorded counts once\n"
    assert len(sessions_of(folder, "flooded")) == 1
    assert_same_losses(folder, "flooded", undisturbed)
    assert ended.left == []
