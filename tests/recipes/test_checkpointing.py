"""The checkpoints of a run, when ranks are lost or look at a folder that changes."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import checkpoint
from shardwise.app.recipes.core.begin import newest_step
from shardwise.app.recipes.core.checkpointing import Checkpoints, SaveError, on_rank_zero
from shardwise.app.recipes.core.position import Position
from shardwise.app.recipes.core.replicas import ReplicaCheckpoints
from shardwise.app.recipes.core.rundir import RunDir
from shardwise.app.recipes.text.config import LmConfig
from shardwise.base.errors import UserError, lost_peer_behind
from shardwise.checkpoint import CheckpointError, storage
from shardwise.checkpoint.disk import commit
from shardwise.checkpoint.disk.commit import steps
from shardwise.elastic.world import World
from shardwise.frontends.strategies import REPLICATE, SHARD
from shardwise.insight.schema.option import OptionError
from shardwise.insight.schema.training import Existing
from tests.recipes.running import train, train_here
from tests.recipes.small import small_config
from tests.worlds import Ranks


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _lose_a_rank_while_saving(rank: int, world_size: int, folder: Path, how: str) -> str:
    model, optimizer = _model()
    checkpoints = Checkpoints(folder)
    checkpoints.save(Position(1, 1), model, optimizer)
    if rank == 1:
        storage.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save = checkpoints.save if how == "at once" else checkpoints.begin
    with pytest.raises(SaveError) as caught:
        _ = save(Position(2, 2), model, optimizer), checkpoints.wait()
    assert lost_peer_behind(caught.value) is not None
    time.sleep(0.5)  # or its end could be taken for another loss
    return str(caught.value)


@pytest.mark.parametrize("how", ["at once", "while training goes on"])
def test_a_save_that_lost_a_rank_says_so_and_is_no_mistake_of_the_user(
    ranks: Ranks, tmp_path: Path, how: str
) -> None:
    outcomes = ranks(_lose_a_rank_while_saving, 3, tmp_path, how, expect_failures=True)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.describe(3)
        assert "rank 1: was lost" in outcome.result
        assert outcome.result.endswith("step 1 is the last that is saved")


def _save_where_ranks_see_different_disks(rank: int, world_size: int, folder: Path) -> list[int]:
    model, optimizer = _model()
    checkpoints = Checkpoints(folder)
    if rank == 1:  # whose cache of the file system is ahead, or behind
        checkpoints.steps = lambda: [1, 2]  # type: ignore[method-assign]
    checkpoints.save(Position(1, 1), model, optimizer)
    checkpoints.begin(Position(2, 2), model, optimizer)
    checkpoints.wait()
    if rank == 1:
        checkpoints.steps = list  # type: ignore[method-assign]
    checkpoints.save(Position(2, 2), model, optimizer)
    checkpoints.begin(Position(2, 2), model, optimizer)
    assert checkpoints.wait() is None, "it is there"
    return steps(folder)


def test_rank_0_decides_whether_a_step_is_saved_already(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_save_where_ranks_see_different_disks, 2, tmp_path) == [[1, 2]] * 2


def _save_where_the_way_cannot_be_cleared(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optimizer = _model()
    told = []
    if rank == 0:
        (folder / "step-00000001").mkdir()  # not complete
        commit.shutil.rmtree = _refuse_to_delete  # type: ignore[assignment]
    for save in (Checkpoints(folder).save, Checkpoints(folder).begin):
        with pytest.raises(SaveError) as caught:
            save(Position(1, 1), model, optimizer)
        told.append(str(caught.value))
        if rank == 0:
            (folder / "step-00000001").mkdir()
        dist.barrier()
    return told


def _refuse_to_delete(path: Path) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_what_is_in_the_way_on_rank_0_is_told_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(_save_where_the_way_cannot_be_cleared, 2, tmp_path)
    for one, other in zip(*by_rank, strict=True):
        for told in (one, other):
            assert "step-00000001: rank 0: " in told
            assert "Permission denied" in told


def _load_where_only_rank_0_looks(rank: int, world_size: int, folder: Path) -> float:
    model, optimizer = _model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=(REPLICATE, SHARD))
    checkpoints = ReplicaCheckpoints(folder, 2, mesh, None)
    nn.init.constant_(model.weight, float(rank))
    checkpoints.save(Position(1, 1), model, optimizer)
    nn.init.constant_(model.weight, -1.0)
    if rank == 1:
        checkpoints.replicas = lambda step: 1  # type: ignore[method-assign]
    checkpoints.load(1, model, optimizer)
    return model.weight.mean().item()


def test_rank_0_decides_which_ranks_load_which_replica(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_load_where_only_rank_0_looks, 2, tmp_path) == [0.0, 1.0]


def _die_in_the_first_save(rank: int, world_size: int, config: LmConfig) -> None:
    storage.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    train(rank, world_size, config)


def test_a_run_killed_in_its_first_save_begins_anew_and_says_so(
    ranks: Ranks, tmp_path: Path
) -> None:
    config = small_config(tmp_path, existing=Existing.AUTO)
    killed = ranks(_die_in_the_first_save, 2, config, expect_failures=True)
    assert [outcome.exitcode for outcome in killed] == [-signal.SIGKILL] * 2
    assert [path.name for path in config.files.checkpoints.iterdir()] == [".step-00000004.partial"]
    again = ranks(train, 2, config, expect_failures=True)
    assert [outcome.result for outcome in again] == [["finished"]] * 2, again[0].describe(2)
    line = (
        f"resume     no checkpoint of the run in {config.files.root} was committed; starting over"
    )
    assert again[0].output.count("resume ") == again[0].output.count(f"{line}\n") == 1
    assert steps(config.files.checkpoints) == [4]
    assert len(config.files.read()["sessions"]) == 1, "nothing of the first is left"


def _resume_what_has_gone(rank: int, world_size: int, config: LmConfig) -> str:
    world = World(rank, world_size, rank, world_size)
    with pytest.raises(UserError) as caught:
        train_here(config.check(world), world)
    dist.barrier()  # nobody waits for rank 0, which alone had looked
    return str(caught.value)


def test_a_run_that_cannot_go_on_is_told_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    config = small_config(tmp_path, existing=Existing.RESUME)
    for told in ranks(_resume_what_has_gone, 2, config):
        assert told.startswith("--resume: found no complete checkpoint in")


def test_a_newest_checkpoint_that_is_damaged_is_neither_skipped_nor_deleted(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=3)
    model, optimizer = _model()
    for step in (1, 2):
        checkpoint.save(checkpoints.path(step), model, optimizer, {})
    files = RunDir(tmp_path)
    assert newest_step(checkpoints, files) == 2
    manifest = checkpoints.path(2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"nodel", 1))
    with pytest.raises(UserError, match=r"is damaged.*move .*step-00000002 away.*from step 1 "):
        newest_step(checkpoints, files)
    checkpoints.path(2).rename(tmp_path / "moved")
    assert newest_step(checkpoints, files) == 1


def _save_where_there_are_no_locks(rank: int, world_size: int, folder: Path) -> list[str]:
    def refuse(*_: object) -> None:  # as Lustre does that is mounted without them
        raise OSError(errno.ENOSYS, "Function not implemented")

    commit.fcntl.flock = refuse  # type: ignore[assignment]
    checkpoints = Checkpoints(folder)
    commit.Commit(checkpoints.path(1))  # and then it was killed
    checkpoints.save(Position(1, 1), *_model())
    left = commit.partial_of(checkpoints.path(2))
    left.mkdir()
    (left / "thesis.txt").touch()
    with pytest.raises(SaveError, match="already exists"):
        checkpoints.save(Position(2, 2), *_model())
    return sorted(str(path.relative_to(folder)) for path in folder.glob("**/*"))


def test_what_a_killed_save_left_is_not_in_the_way_where_there_are_no_locks(
    ranks: Ranks, tmp_path: Path
) -> None:
    [found] = ranks(_save_where_there_are_no_locks, 1, tmp_path)
    assert found == [
        ".step-00000002.partial",
        ".step-00000002.partial/thesis.txt",
        "step-00000001",
        "step-00000001/manifest.json",
        "step-00000001/shard-00000-of-00001.safetensors",
    ]


def _look(rank: int, world_size: int, folder: Path) -> list[str]:
    def see() -> list[str]:
        assert rank == 0, "the others are told"
        return ["step-00000001"]

    return on_rank_zero("looking", see)


def test_what_rank_0_sees_all_ranks_return(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_look, 3, tmp_path) == [["step-00000001"]] * 3


def _fail(rank: int, world_size: int, folder: Path) -> list[tuple[type, int, str]]:
    def refuse() -> None:
        raise OptionError("--resume", "no run", "a run")

    def refuse_otherwise() -> None:
        raise SaveError("a full disk")

    def read() -> str:
        return (folder / "missing").read_text()

    told = []
    for act in (refuse, refuse_otherwise, read):
        with pytest.raises(UserError) as caught:
            on_rank_zero("looking", act)
        told.append((type(caught.value), caught.value.exit_code, str(caught.value)))
    with pytest.raises(CheckpointError, match="looking: rank 0: ZeroDivisionError"):
        on_rank_zero("looking", lambda: 1 // 0)
    dist.barrier()  # nobody is left behind
    return told


def test_what_rank_0_raises_all_ranks_raise(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(_fail, 3, tmp_path)
    expected = [
        (OptionError, 2, "--resume: found no run, expected a run"),
        (SaveError, 1, "a full disk"),
        (UserError, 2, f"looking: {tmp_path / 'missing'}: No such file or directory"),
    ]
    assert by_rank == [expected] * 3
