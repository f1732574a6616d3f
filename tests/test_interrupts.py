"""Ctrl-C at any line of what records, watches, saves and locks: the next use works."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise import checkpoint, timeline
from shardwise._torch.fsdp import torch_groups
from shardwise.app.recipes.core import rundir
from shardwise.base import files, observe, repeated
from shardwise.checkpoint import storage
from shardwise.checkpoint.disk import commit
from shardwise.checkpoint.ranks import saving
from shardwise.diloco import QuorumServer, quorum_server
from shardwise.elastic import registry, store
from shardwise.frontends import summon, watch_ranks
from shardwise.frontends import torch_groups as observed_groups
from shardwise.insight import audit
from shardwise.timeline import recorder, recording
from tests.harness import run_ranks
from tests.interrupts import at_every_line


def _files(*modules: Any) -> list[str]:
    return [each.__file__ for each in modules]


def test_a_recording() -> None:
    model = nn.Linear(2, 2)
    for attempt in at_every_line(_files(recording, recorder, observe)):
        with attempt, timeline.record():
            model(torch.ones(1, 2))
        assert not observe.is_observed(), attempt.where
        with timeline.record() as recorded:
            model(torch.ones(1, 2))
        assert recorded.timeline is not None


@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")  # not a lock
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save])
def test_a_checkpoint(save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is complete, and the next one of the same name can be saved."""
    for sync in ("fsync", "fdatasync"):  # half of the time: no power fails here
        monkeypatch.setattr(os, sync, lambda handle: None)
    model, path = nn.Linear(2, 2), tmp_path / "step"
    is_here = save is checkpoint.save  # and not in another thread
    counted = (commit, files, saving, storage) if is_here else (saving,)
    for attempt in at_every_line(_files(*counted)):
        with attempt:
            save(path, model)
            saving.wait_for_save()
        saving.wait_for_save()
        assert not any(each.name.startswith("saving") for each in threading.enumerate())
        if path.exists():
            checkpoint.load(path, model)
            commit.delete(path)
        checkpoint.save(path, model)
        commit.delete(path)
        assert not list(tmp_path.iterdir()), attempt.where


def test_the_lock_of_a_run(tmp_path: Path) -> None:
    run = rundir.RunDir(tmp_path / "run")
    for attempt in at_every_line(_files(rundir, files)):
        with attempt, rundir.locked(run):
            pass
        with rundir.locked(run):
            pass


def _torchs() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for each in (model[0], model):
        fully_shard(each)
    return model


def _watched(rank: int, world_size: int) -> None:
    model = _torchs()
    before = [each.collectives for each in torch_groups(model)]
    for attempt in at_every_line(_files(watch_ranks, observed_groups)):
        with attempt, shardwise.watch_ranks(model):
            pass
        assert [each.collectives for each in torch_groups(model)] == before, attempt.where
        assert not any(each.name == "shardwise-watch" for each in threading.enumerate())
    with shardwise.watch_ranks(model):
        model(torch.ones(1, 2)).sum().backward()


def _audited(rank: int, world_size: int) -> None:
    model = _torchs()
    for attempt in at_every_line(_files(audit)):
        with attempt, shardwise.audit(model):
            _ = next(iter(model.parameters())) * 2
        with shardwise.audit(model):
            _ = next(iter(model.parameters())) * 2
        assert torch.overrides._get_current_function_mode() is None, attempt.where
    dist.barrier()


def _summoned(rank: int, world_size: int) -> None:
    model = shardwise.FullyShardedDataParallel(nn.Linear(2, 2))
    before = model.module.weight.full_tensor().clone()
    for attempt in at_every_line(_files(summon)):
        with attempt, model.summon_full_params(model):
            model.module.weight.detach().add_(1)
        with model.summon_full_params(model):
            assert not hasattr(model.module.weight, "full_tensor"), attempt.where
        assert hasattr(model.module.weight, "full_tensor"), attempt.where
        model(torch.ones(1, 2)).sum().backward()
    assert not torch.equal(model.module.weight.full_tensor(), before)


def test_servers() -> None:
    for attempt in at_every_line(_files(quorum_server, registry, repeated, store)):
        made = []
        with attempt:
            made.append(QuorumServer(1, deadline=1.0))
        for server in made:
            server.close()
        running = [each.name for each in threading.enumerate() if "shardwise" in each.name]
        assert not set(running) & {"shardwise store", "shardwise quorum"}, attempt.where


@pytest.mark.parametrize("program", [_watched, _audited, _summoned])
def test_what_looks_at_ranks(program: Any) -> None:
    run_ranks(program, 1)
