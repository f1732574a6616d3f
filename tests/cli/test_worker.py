"""``shardwise train`` as a function, in processes and a process group of another program."""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.app.recipes.core import loop
from shardwise.base.errors import PeerLostError, UserError
from shardwise.elastic import rank as ranks_life
from shardwise.elastic.errors import Stopped
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import WORKER_JOB, World
from shardwise.insight.schema.option import OptionError
from shardwise.worker import train
from tests.recipes.running import train as train_here
from tests.recipes.small import losses, small_config
from tests.worlds import Ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_recipe.py"
WORLD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
LM = (
    "lm --model config.json --data words.txt --seq-length 16 --batch-size 2 --lr 0.01 --warmup 2 "
    "--steps 4 --checkpoint-every 2 --eval-every 0 --device cpu --sample-tokens 0"
)


def _arguments(folder: Path, *more: str) -> list[str]:
    files = LM.replace("config.json", f"{folder}/config.json")
    return [*files.replace("words.txt", f"{folder}/words.txt").split(), *more]


def _workers(rank: int, world_size: int, folder: Path) -> list[str]:
    """Train in a thread, fail after step 3, and start again as the same job and as another."""
    worker_of = runpy.run_path(str(EXAMPLE))["worker"]
    handler = signal.getsignal(signal.SIGTERM)
    step = loop.Loop._step

    def fails(self: loop.Loop, position: Any) -> Any:
        if position.step == 3:
            raise ValueError(f"rank {rank} fails")
        return step(self, position)

    ends: list[str] = []

    def run(job: str) -> None:
        try:
            worker_of({"arguments": _arguments(folder, "--out", f"{folder}/run"), "job": job})
            ends.append("returned")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")

    jobs = [("first", True), ("first", False)]
    if rank == 0:  # which looks at the folder, and would leave the others waiting
        jobs.append(("second", False))
    for job, faulty in jobs:
        loop.Loop._step = fails if faulty else step  # type: ignore[method-assign]
        thread = threading.Thread(target=run, args=[job])
        thread.start()
        thread.join()
    assert dist.is_initialized(), "the process group belongs to the program"
    assert signal.getsignal(signal.SIGTERM) is handler
    assert WORKER_JOB not in os.environ
    return ends


def test_a_job_that_starts_its_workers_again_continues_its_run(
    ranks: Ranks, tmp_path: Path
) -> None:
    config = small_config(tmp_path)
    for rank, (first, again, *other) in enumerate(ranks(_workers, 2, tmp_path)):
        assert first == f"ValueError: rank {rank} fails"
        assert again == "returned"
        assert all("found a run in" in text for text in other), "another job is refused"
    assert [session["from_step"] for session in config.files.read()["sessions"]] == [0, 2]
    whole = small_config(tmp_path, "whole")
    ranks(train_here, 2, whole)
    assert losses(config) == losses(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "runs/lm"], "--out: found runs/lm, expected an absolute path"),
        (["--steps", "many"], "--steps: found 'many', expected a whole number"),
        (["--nproc", "2"], "--nproc"),
    ],
)
def test_wrong_arguments_are_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], message: str
) -> None:
    small_config(tmp_path)
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        train(_arguments(tmp_path, *arguments), "job")


def test_a_worker_needs_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WORLD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "shardwise.worker.commands", lambda *_: pytest.fail("processes are started")
    )
    with pytest.raises(UserError, match="RANK"):
        train(["lm"], "job")


def test_a_rank_that_lost_a_peer_raises_after_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    # Of this module alone: threads that other tests have left sleep, too.
    monkeypatch.setattr(ranks_life, "time", SimpleNamespace(sleep=slept.append, time=time.time))

    def fail(error: BaseException) -> None:
        def body(world: World, signals: StopSignals) -> None:
            raise error

        with pytest.raises(type(error)):
            ranks_life.run_worker(World(0, 2, 0, 2), body)

    fail(ValueError("a cause of its own"))
    assert not slept
    fail(PeerLostError("rank 1"))
    assert len(slept) == 1


@pytest.mark.parametrize(
    "error", [OptionError("--lr", 0, "more"), UserError("text"), Stopped(15, "saved")]
)
def test_errors_can_be_sent_to_the_program_that_started_the_job(error: BaseException) -> None:
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is type(error)
    assert (sent.args, vars(sent)) == (error.args, vars(error))
