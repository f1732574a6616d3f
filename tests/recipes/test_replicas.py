"""A language model trained by replicas that meet seldom: recorded, saved, stopped and resumed."""

from __future__ import annotations

import errno
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.app.recipes.core.checkpointing import Checkpoints, SaveError
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.replicas import ReplicaCheckpoints
from shardwise.app.recipes.text.config import LmConfig
from shardwise.checkpoint.disk import commit
from shardwise.frontends.strategies import REPLICATE, SHARD, Strategy
from shardwise.insight.schema.training import DilocoConfig, Existing, OptimizerName
from tests.recipes.corpora import texts, write_jsonl
from tests.recipes.running import as_after
from tests.recipes.small import losses, small_config, validation, write_model
from tests.recipes.test_lm import train, train_until
from tests.worlds import Ranks, on_processes

#: Exchanges begin after steps 2 (fragment 1), 4 (0), 6 (1): after step 4 one is under way.
STREAMING = DilocoConfig(local_steps=4, wire="int8", fragments=2, overlap=1, alpha=0.5)


def diloco(folder: Path, name: str, **settings: Any) -> LmConfig:
    given = {"replicas": 2, "diloco": STREAMING, "checkpoint_every": 4, "steps": 7, **settings}
    return small_config(folder, name, strategy=Strategy.DILOCO, eval_every=4, **given)


def train_and_resume(rank: int, world_size: int, whole: LmConfig, resumed: LmConfig) -> list[str]:
    """In one world, whose ranks import what reads documents once."""
    ended = train(rank, world_size, whole)
    if rank == 0:
        as_after(4, whole, resumed)
    dist.barrier()
    return [*ended, *train(rank, world_size, resumed)]


def test_a_run_goes_on_bit_for_bit_from_inside_a_round(ranks: Ranks, tmp_path: Path) -> None:
    # Documents that are streamed: each replica's checkpoint says where the streams of all stand.
    documents = (str(write_jsonl(tmp_path / "corpus.jsonl", texts(300))),)
    given: dict[str, Any] = {
        "diloco": replace(STREAMING, wire="ternary"),  # errors are kept, so they are saved
        "algorithm": OptimizerName.MUON,
    }
    whole = replace(diloco(tmp_path, "whole", async_checkpoint=True, **given), data=documents)
    resumed = replace(
        diloco(tmp_path, "resumed", existing=Existing.RESUME, **given), data=documents
    )
    assert ranks(train_and_resume, 2, whole, resumed) == [["finished"] * 2] * 2
    assert losses(resumed) == losses(whole)
    assert validation(resumed) == validation(whole)
    folder = whole.files.checkpoints
    second, first = (
        (each / "step-00000004" / "manifest.json").stat().st_mtime_ns
        for each in (folder / "replicas" / "1", folder)
    )
    assert second < first, "the first replica commits last"
    assert [step for step, _ in validation(whole)] == [4, 7]
    assert [s["from_step"] for s in resumed.files.read()["sessions"]] == [0, 4]


def test_a_run_goes_on_with_other_shards_and_other_replicas(ranks: Ranks, tmp_path: Path) -> None:
    model = str(write_model(tmp_path, attention_dropout=0.0))
    plain: dict[str, Any] = {"model": model, "diloco": DilocoConfig(local_steps=3)}
    whole = diloco(tmp_path, "whole", **plain, batch_size=1)
    ranks(train, 4, whole)
    # One rank a replica instead of two, with the same sequences.
    fewer = diloco(tmp_path, "fewer", **plain, batch_size=2, existing=Existing.RESUME)
    one = diloco(tmp_path, "one", **plain, replicas=1, existing=Existing.RESUME)
    for config in (fewer, one):
        as_after(4, whole, config)
    ranks(train, 2, fewer, one)
    for found, expected in zip(validation(fewer), validation(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert [step for step, _, _ in losses(one)] == [1, 2, 3, 4, 5, 6, 7]
    assert Checkpoints(one.files.checkpoints).replicas(7) == 1
    # What one replica has saved two go on from; and none but replicas.
    two = diloco(
        tmp_path, "one", **{**plain, "batch_size": 1, "existing": Existing.RESUME, "steps": 8}
    )
    assert ranks(train, 2, two) == [["finished"]] * 2
    assert Checkpoints(two.files.checkpoints).replicas(8) == 2
    full = small_config(tmp_path, "one", model=model, steps=9, existing=Existing.RESUME)
    with pytest.raises(AssertionError, match="was saved by --strategy diloco; go on with that"):
        ranks(train, 1, full)


def test_all_replicas_stop_together_and_soon(ranks: Ranks, tmp_path: Path) -> None:
    stopped = diloco(tmp_path, "stopped", checkpoint_every=0)
    # Ranks of different replicas tell each other after steps 4 and 8, not after every step.
    told = ranks(train_until, 2, stopped, 2, signal.SIGTERM, 1)
    assert told[0] == told[1]
    assert "Stopped by SIGTERM after step 4 of 7, which is saved" in told[0]
    checkpoints = stopped.files.checkpoints
    assert sorted(path.name for path in checkpoints.iterdir()) == ["replicas", "step-00000004"]


@on_processes(2)
def test_a_checkpoint_is_of_one_attempt(rank: int, world_size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=(REPLICATE, SHARD))
    checkpoints = ReplicaCheckpoints(tmp_path, 2, mesh, None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for attempt in (1, 2):
        nn.init.constant_(model.weight, attempt)
        checkpoints.save(Position(40, 400 * attempt), model, optimizer)
        dist.barrier()
        if attempt == 1 and rank == 0:  # the job ended before the first replica, the last, was done
            shutil.rmtree(tmp_path / "step-00000040")
        dist.barrier()
    nn.init.zeros_(model.weight)
    assert checkpoints.load(40, model, optimizer) == Position(40, 800)
    assert model.weight.unique().tolist() == [2.0]


def _saved_beside_a_later_step_that_was_never_whole(
    rank: int, world_size: int, folder: Path
) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=(REPLICATE, SHARD))
    checkpoints = ReplicaCheckpoints(folder, 1, mesh, None)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (10, 20):
        checkpoints.save(Position(step, step), model, optimizer)
        dist.barrier()
        if step == 10 and rank == 0:
            shutil.copytree(folder, folder.with_name("at 10"))
        dist.barrier()
    found = []
    if rank == 0:  # as if the job had ended before the first replica had saved step 20
        shutil.rmtree(folder / "step-00000020")
        shutil.copytree(folder.with_name("at 10"), folder, dirs_exist_ok=True)
        commit.Commit.publish = _refuse_to_publish  # type: ignore[method-assign]
    dist.barrier()
    with pytest.raises(SaveError):
        checkpoints.save(Position(15, 15), model, optimizer)
    assert checkpoints.load(10, model, optimizer) == Position(10, 10)
    dist.barrier()
    found.append(sorted(path.name for path in (folder / "replicas" / "1").iterdir()))
    dist.barrier()
    if rank == 0:
        commit.Commit.publish = _PUBLISH  # type: ignore[method-assign]
    checkpoints.save(Position(15, 15), model, optimizer)
    dist.barrier()
    found.append(sorted(path.name for path in (folder / "replicas" / "1").iterdir()))
    return found


_PUBLISH = commit.Commit.publish


def _refuse_to_publish(self: commit.Commit) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_the_first_replica_goes_on_from_is_never_deleted_of_the_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    told = ranks(_saved_beside_a_later_step_that_was_never_whole, 2, tmp_path / "checkpoints")
    assert told[0] == [
        ["step-00000010", "step-00000015", "step-00000020"],
        ["step-00000015"],
    ]
