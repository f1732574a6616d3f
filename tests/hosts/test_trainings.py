"""Training over two hosts, with faults and without: the result is that of one process.

Starting means importing torch, which takes processors; noticing that a host is silent takes only
time. So all jobs run at once, each over two hosts of its own, and the tests look at their results.
What hosts tell each other is tested without torch in ``test_rules.py``; trainings with more of
these faults are in the long run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks._hosts import two_hosts
from shardwise.base import libc
from tests.harness import run_ranks
from tests.hosts.jobs import (
    WAIT,
    Ended,
    Fault,
    Job,
    kill_host,
    kill_rank,
    pause_host,
    started,
)
from tests.hosts.network import needs_hosts
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.digits import small_mnist
from tests.recipes.running import train
from tests.recipes.small import losses, small_config, write_model

pytestmark = needs_hosts

Jobs = Mapping[str, Future[Ended]]
Losses = list[tuple[int, float, float]]  # step, loss and norm of the gradient

GBIT = 0.0035  # a step's gradients take 0.2 s, so that a fault comes before the last step
STEPS, EVERY = 20, 5  # of a training; from one checkpoint to the next
FAULT = 7  # the step after which the fault happens
OVER_HOSTS = "--nnodes 2 --rdzv 10.77.0.1:29412 --node-rank RANK"
LM = (
    "train lm --model config.json --data corpus.jsonl --seq-length 16 --batch-size 2 "
    f"--batch-tokens 128 --lr 0.01 --warmup 2 --checkpoint-every {EVERY} --eval-every 0 "
    "--device cpu --sample-tokens 0 --strategy hybrid"
)
MNIST = "train mnist --data-dir mnist --batch-size 16 --epochs 1 --warmup 2 --device cpu"


def disturbed(folder: Path, name: str, fault: Fault, nproc: int) -> Ended:
    """Train with a fault."""
    options = f"--steps {STEPS} --nproc {nproc} --max-restarts 1 --out {name} {OVER_HOSTS}"
    with two_hosts(GBIT) as hosts, Job(hosts, folder, name, "shardwise", f"{LM} {options}") as job:
        return job.disturb(FAULT, fault)


def under_torchrun(folder: Path, name: str) -> Ended:
    """Train with ranks that ``torchrun`` starts, two on each host."""
    launcher = "--nnodes=2 --nproc-per-node=2 --node-rank=RANK --master-addr 10.77.0.1"
    training = f"-m shardwise {LM} --steps {STEPS} --out {name}"
    arguments = f"{launcher} --master-port 29412 {training}"
    with two_hosts() as hosts, Job(hosts, folder, name, "torch.distributed.run", arguments) as job:
        return job.end()


def on_digits(folder: Path, name: str) -> Ended:
    """Train another recipe, one rank on each host."""
    options = f"{MNIST} --nproc 1 --out {name} {OVER_HOSTS}"
    with two_hosts() as hosts, Job(hosts, folder, name, "shardwise", options) as job:
        return job.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the data and the results of all jobs."""
    folder = tmp_path_factory.mktemp("trainings")
    write_model(folder, attention_dropout=0.0)
    write_jsonl(folder / "corpus.jsonl", texts(300))
    small_mnist(folder)
    return folder


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, folder: Path) -> Iterator[Jobs]:
    """The jobs, running."""
    every = {
        "paused": partial(disturbed, fault=pause_host, nproc=1),
        "rank": partial(disturbed, fault=kill_rank, nproc=1),
        "host": partial(disturbed, fault=kill_host, nproc=2),
        "torchrun": under_torchrun,
        "digits": on_digits,
    }
    with ThreadPoolExecutor() as pool:
        yield started(request, pool, every, {"paused", "rank", "digits"}, folder)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, jobs: Jobs) -> Losses:
    """The losses of one process."""
    del jobs  # which have begun
    one = small_config(folder, "one-process", steps=STEPS, batch_size=8, checkpoint_every=0)
    one = replace(one, data=(str(folder / "corpus.jsonl"),), streams=8)
    run_ranks(train, 1, one, timeout=WAIT)
    return losses(one)


def sessions_of(folder: Path, name: str) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = small_config(folder, name).files.read()["sessions"]
    return sessions


def assert_same_losses(folder: Path, name: str, expected: Losses) -> None:
    for found, step in zip(losses(small_config(folder, name)), expected, strict=True):
        assert found == pytest.approx(step, rel=1e-4), name


def assert_went_on(folder: Path, name: str, ended: Ended, world_size: int, hosts: int) -> None:
    """Check the second session, from the last checkpoint, and that nothing is left of either."""
    print(f"{name}: named after {ended.named:.1f} s; host 1 ended after {ended.closed:.1f} s")
    assert ended.codes[0] == 0, ended.told[0]
    first, second = sessions_of(folder, name)
    assert first["hosts"] == 2
    assert (second["world_size"], second["hosts"]) == (world_size, hosts)
    assert second["from_step"] in range(FAULT // EVERY * EVERY, STEPS, EVERY)
    assert ended.left == []


@pytest.mark.long
def test_a_paused_host_is_named_and_harms_nothing_when_it_wakes(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["paused"].result()
    assert "host 1 (10.77.0.2) was lost: no sign of life for 10 s" in ended.told[0]
    assert "continuing with 1 host" in ended.told[0]
    assert ended.codes[1] == 1
    assert "host 0 (10.77.0.1:29412) was lost" in ended.told[1]
    assert "--auto-resume" in ended.told[1]
    assert_went_on(folder, "paused", ended, world_size=1, hosts=1)
    assert_same_losses(folder, "paused", undisturbed)


@pytest.mark.long
def test_a_killed_rank_is_named_and_all_hosts_begin_again(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["rank"].result()
    again = "a rank of host 1 (10.77.0.2) failed; continuing with 2 hosts"
    assert all(again in told for told in ended.told)
    assert "rank 1 of 2 was killed by SIGKILL" in ended.told[1]
    assert ended.codes[1] == 0
    assert_went_on(folder, "rank", ended, world_size=2, hosts=2)
    assert_same_losses(folder, "rank", undisturbed)


def test_a_killed_host_is_named_and_the_other_trains_on(
    jobs: Jobs, folder: Path, undisturbed: Losses
) -> None:
    ended = jobs["host"].result()
    assert "host 1 (10.77.0.2) was lost: the connection was closed" in ended.told[0]
    assert "continuing with 1 host" in ended.told[0]
    inside = "shm" if libc.has_futex() else "gloo"
    mesh = f"hybrid over dp_replicate=2 x dp_shard=2, transport gloo/{inside}"
    assert f"sharding   {mesh}" in ended.said
    assert_went_on(folder, "host", ended, world_size=2, hosts=1)
    assert_same_losses(folder, "host", undisturbed)


def test_torchrun_over_hosts_trains_the_same(jobs: Jobs, folder: Path, undisturbed: Losses) -> None:
    ended = jobs["torchrun"].result()
    assert ended.codes == [0, 0], ended.told
    [session] = sessions_of(folder, "torchrun")
    assert (session["world_size"], session["hosts"]) == (4, 2)
    assert "hybrid over dp_replicate=2 x dp_shard=2" in ended.said
    assert_same_losses(folder, "torchrun", undisturbed)
    assert ended.left == []


@pytest.mark.long
def test_pictures_over_hosts_are_learned_as_on_one(jobs: Jobs, folder: Path) -> None:
    here = small_mnist(folder, "here", weight_decay=0.01, clip_grad=0.0)
    run_ranks(train, 2, here, timeout=WAIT)
    ended = jobs["digits"].result()
    assert ended.codes == [0, 0], ended.told
    [session] = sessions_of(folder, "digits")
    assert (session["world_size"], session["hosts"]) == (2, 2)
    assert losses(small_mnist(folder, "digits")) == losses(here)
    assert ended.left == []
