"""Hosts that are killed again and again: what the others keep in memory loses no bit.

All jobs run at once, as in ``test_trainings.py``. There is no checkpoint before the end.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks._hosts import switched_hosts
from shardwise.base.errors import UserError
from tests.harness import run_ranks
from tests.hosts.jobs import WAIT, Ended, Job, _signal_all, kill_host, started
from tests.hosts.network import needs_hosts
from tests.hosts.test_trainings import GBIT, LM, OVER_HOSTS, sessions_of
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.running import train
from tests.recipes.small import losses, small_config, write_model

pytestmark = needs_hosts

Jobs = Mapping[str, Future[Ended]]

EVERY = 2  # steps from one version to the next
BETWEEN = 5  # steps from one kill to the next
KILLS = 50
OPTIONS = (
    f"{LM.replace('--strategy hybrid', '--strategy full')} --nproc 1 {OVER_HOSTS} "
    f"--replicate-every {EVERY}"
)
OPTIONS = OPTIONS.replace("--batch-tokens 128", "--batch-tokens 192 --streams 12")
OPTIONS = OPTIONS.replace("--checkpoint-every 5", "--checkpoint-every 0")
OVER_THREE, ALWAYS_THREE = (
    OPTIONS.replace("--nnodes 2", n) for n in ("--nnodes 3", "--nnodes 3:3")
)


def steps_for(kills: int) -> int:
    """Return the steps of a training with so many kills."""
    return BETWEEN * (kills + 1)


def killed(folder: Path, name: str, kills: int = 1) -> Ended:
    """Train over three hosts; kill one of them, start another in its place, and again."""
    draw = random.Random(kills)
    options = f"{ALWAYS_THREE} --steps {steps_for(kills)} --max-restarts {kills} --out {name}"
    options += " --auto-resume"  # as another host 0 needs
    with switched_hosts(3, GBIT) as hosts, Job(hosts, folder, name, "shardwise", options) as job:
        commands = [*job.commands]  # by host
        for number in range(1, kills + 1):
            job.wait_for_step(BETWEEN * number + draw.randrange(EVERY))
            host, began = draw.randrange(3) if kills > 1 else 1, time.monotonic()
            commands[host].kill()  # first, or it might report its ranks
            _signal_all(hosts[host].running(), signal.SIGKILL)
            job.start(hosts[host], str(host))
            commands[host] = job.commands[-1]
            job.wait_until(partial(_is_in_session, job, folder, name, number + 1), "a step")
            start = sessions_of(folder, name)[-1]["from_step"]
            late = time.monotonic() - began
            print(f"kill {number}, host {host}: on from {start} after {late:.1f} s", flush=True)
        codes = [command.wait(timeout=WAIT) for command in commands]
        return replace(job.end(), codes=codes)


def _is_in_session(job: Job, folder: Path, name: str, number: int) -> bool:
    """Whether a session has made a step."""
    try:
        sessions = sessions_of(folder, name)
    except UserError:  # there is no file yet
        return False
    return len(sessions) == number and job.steps() > sessions[-1]["from_step"]


def without_one(folder: Path, name: str) -> Ended:
    """Train over three hosts, and kill one."""
    options = f"{OVER_THREE} --steps {steps_for(1)} --max-restarts 1 --out {name}"
    with switched_hosts(3, GBIT) as hosts, Job(hosts, folder, name, "shardwise", options) as job:
        return job.disturb(BETWEEN, kill_host)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the data and the results of all jobs."""
    folder = tmp_path_factory.mktemp("neighbor")
    write_model(folder, attention_dropout=0.0)
    write_jsonl(folder / "corpus.jsonl", texts(300))
    return folder


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, folder: Path) -> Iterator[Jobs]:
    """The jobs, running."""
    every = {"once": killed, "often": partial(killed, kills=KILLS), "without": without_one}
    with ThreadPoolExecutor() as pool:
        yield started(request, pool, every, {"often", "without"}, folder)


def undisturbed(folder: Path, kills: int) -> list[tuple[int, float, float]]:
    """Train on three ranks without a fault; return the losses."""
    calm = small_config(folder, f"calm-{kills}", steps=steps_for(kills), checkpoint_every=0)
    calm = replace(calm, data=(str(folder / "corpus.jsonl"),), streams=12)
    calm = calm.with_train(batch_size=2, accumulate=2)
    run_ranks(train, 3, calm, timeout=WAIT)
    return losses(calm)


def check(folder: Path, name: str, ended: Ended, kills: int) -> None:
    """Check that each loss is that of a run without faults, and that no step was lost twice."""
    assert ended.codes == [0, 0, 0], ended.told
    first, *others = sessions_of(folder, name)
    assert len(others) == kills
    assert all(session["world_size"] == 3 for session in (first, *others))
    for number, session in enumerate(others, 1):
        assert session["from_step"] >= BETWEEN * number - 2 * EVERY
    assert losses(small_config(folder, name)) == undisturbed(folder, kills)
    assert ended.left == []
    assert not [*Path("/dev/shm").glob("shardwise-*/*")], "nothing is left in memory"


def test_a_host_is_replaced_and_no_bit_is_lost_without_a_disk(jobs: Jobs, folder: Path) -> None:
    ended = jobs["once"].result()
    assert "of 3 hosts" in ended.said, ended.said
    assert "is back, without the disk" in ended.said
    check(folder, "once", ended, 1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_hosts_are_killed_fifty_times(jobs: Jobs, folder: Path) -> None:
    check(folder, "often", jobs["often"].result(), KILLS)


@pytest.mark.long
def test_two_hosts_of_three_go_on_from_memory(jobs: Jobs, folder: Path) -> None:
    ended = jobs["without"].result()
    assert (ended.codes[0], ended.codes[2]) == (0, 0), ended.told
    first, second = sessions_of(folder, "without")
    assert (first["hosts"], second["hosts"]) == (3, 2)
    assert second["from_step"] >= BETWEEN - 2 * EVERY
    found = losses(small_config(folder, "without"))
    for one, other in zip(found, undisturbed(folder, 1), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert ended.left == []
