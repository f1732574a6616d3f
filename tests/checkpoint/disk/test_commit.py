"""A checkpoint is there whole or not at all: full disks, failing ranks, killed processes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.base.errors import PeerLostError, lost_peer_behind
from shardwise.checkpoint import CheckpointError, storage
from shardwise.checkpoint.disk import beside, commit, safetensors
from shardwise.checkpoint.disk import manifest as manifests
from shardwise.checkpoint.disk.entries import MANIFEST, ModelFacts
from shardwise.checkpoint.disk.manifest import Manifest, read_manifest, write_manifest
from shardwise.checkpoint.disk.pieces import PieceReader
from shardwise.checkpoint.disk.safetensors import BLOCK
from shardwise.checkpoint.formats.detect import Format
from shardwise.checkpoint.tools.convert import convert
from tests.checkpoint.meshes import Setup, build, fill, filled, give_state, wrong
from tests.checkpoint.small import SHARD, make, save_small
from tests.worlds import Ranks

pytestmark = pytest.mark.usefixtures("new_ranks")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def verify(folder: Path) -> None:
    """Read every byte, and compare checksums."""
    manifest = read_manifest(folder)
    with PieceReader(folder, manifest) as reader:
        for entry in manifest.tensors:
            for piece in entry.pieces:
                assert all(chunk.nbytes for chunk in reader.stream(entry, piece))


# ---- what is there ----


def test_latest_is_the_newest_that_is_complete(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (1, 9, 10, 100, 123_456_789):
        save_small(checkpoint.step_folder(tmp_path, step))
    assert checkpoint.steps(tmp_path) == [1, 9, 10, 100, 123_456_789]
    (checkpoint.step_folder(tmp_path, 123_456_789) / MANIFEST).unlink()
    os.truncate(checkpoint.step_folder(tmp_path, 100) / SHARD, 10)
    (checkpoint.step_folder(tmp_path, 10) / SHARD).unlink()
    assert checkpoint.steps(tmp_path) == [1, 9]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000009"


def test_the_last_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000001").mkdir()  # not complete: perhaps somebody's
    for step in (2, 3, 4, 5):
        save_small(checkpoint.step_folder(tmp_path, step), keep_last=2)
    assert names(tmp_path) == ["notes", "step-00000001", "step-00000004", "step-00000005"]
    save_small(checkpoint.step_folder(tmp_path, 3), keep_last=2)  # begun anew from step 2, say
    assert checkpoint.steps(tmp_path) == [3, 5], "the one just saved is never deleted"
    with pytest.raises(ValueError, match="keep_last: found 0"):
        save_small(tmp_path / "x", keep_last=0)


def test_named_checkpoints_are_kept_beside_the_last(tmp_path: Path) -> None:
    best = checkpoint.step_folder(tmp_path, 1)
    for step in (1, 2, 3, 4):
        save_small(checkpoint.step_folder(tmp_path, step), keep_last=2, keep=[best])
    assert checkpoint.steps(tmp_path) == [1, 3, 4]
    best = checkpoint.step_folder(tmp_path, 4)
    save_small(checkpoint.step_folder(tmp_path, 5), keep_last=2, keep=[best])
    assert checkpoint.steps(tmp_path) == [4, 5], "it counts as one of the last, if it is one"


# ---- leftovers ----


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_leftovers_of_dead_processes_are_deleted_at_the_next_save(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:  # dies between writing and renaming
        storage.Commit.publish = lambda self: os._exit(0)  # type: ignore[method-assign]
        save_small(tmp_path / "a")
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert names(tmp_path / ".a.partial") == [MANIFEST, SHARD]
    assert checkpoint.latest(tmp_path) is None
    save_small(tmp_path / "b")
    assert names(tmp_path) == ["b"]


def test_what_a_living_process_writes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    writing = commit.Commit(tmp_path / "other")
    (tmp_path / ".mine.partial").mkdir()
    (tmp_path / ".mine.partial" / "thesis.txt").write_text("ours")
    save_small(tmp_path / "a")
    assert names(tmp_path) == [".mine.partial", ".other.partial", "a"]
    with pytest.raises(CheckpointError, match="is another process saving to the same path"):
        save_small(tmp_path / "other")
    writing.abandon()
    save_small(tmp_path / "other")


# ---- several processes beside each other ----


def test_the_highest_step_stays_when_a_process_saves_a_lower_one(tmp_path: Path) -> None:
    for step in (1, 9):
        save_small(checkpoint.step_folder(tmp_path, step), keep_last=1)
    save_small(checkpoint.step_folder(tmp_path, 2), keep_last=1)  # by a process that knows no 9
    assert checkpoint.steps(tmp_path) == [2, 9]
    save_small(checkpoint.step_folder(tmp_path, 10), keep_last=1)
    assert checkpoint.steps(tmp_path) == [10]


def test_a_partial_folder_has_a_lock_before_another_process_can_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner that comes between the making of the folder and its lock has to wait."""
    lock, cleaners = commit._try_lock, []

    def lock_late(handle: int) -> commit._LockAttempt:
        if not cleaners and (tmp_path / ".a.partial").exists():
            cleaners.append(threading.Thread(target=commit.clean, args=(tmp_path,)))
            cleaners[0].start()
            cleaners[0].join(0.2)  # as long as it would need several times over
        return lock(handle)

    monkeypatch.setattr(commit, "_try_lock", lock_late)
    writing = commit.Commit(tmp_path / "a")
    cleaners[0].join(30)
    assert writing.partial.is_dir()
    writing.abandon()


@pytest.mark.parametrize("moment", ["_is_ours", "_rename_away"])
def test_a_leftover_that_disappears_while_it_is_cleaned_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another process deletes a checkpoint without its lock, if its publisher still holds that."""
    (tmp_path / ".deleted-00000000.partial").mkdir()
    next_step = getattr(commit, moment)

    def after_it_is_deleted(partial: Path) -> object:
        partial.rmdir()
        return next_step(partial)

    monkeypatch.setattr(commit, moment, after_it_is_deleted)
    commit.clean(tmp_path)
    assert names(tmp_path) == []


def test_a_lock_that_nobody_lets_go_of_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_MOST_SECONDS", 0.05)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=r"another process has held its lock for 0.05 s"):
        commit.Commit(tmp_path / "a")
    os.close(holder)
    commit.Commit(tmp_path / "a").abandon()


def _commit_many(folder: Path, steps: range) -> None:
    """Commit empty checkpoints, one after the other, and keep two."""
    for step in steps:
        path = checkpoint.step_folder(folder, step)
        try:
            writing = commit.Commit(path)
        except CheckpointError:  # another process has this step, or is at it
            continue
        shutil.copyfile(folder / MANIFEST, writing.partial / MANIFEST)
        writing.publish()
        commit.keep_last(folder, 2, spare=path)
        kept = [int(name.removeprefix("step-")) for name in os.listdir(folder) if name[0] == "s"]
        assert max(kept) >= step, "the newest is lost"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("same_steps", [False, True], ids=["different steps", "same steps"])
def test_processes_commit_and_delete_beside_each_other(tmp_path: Path, same_steps: bool) -> None:
    write_manifest(tmp_path, Manifest((), (), {}, BLOCK, 1, "", ModelFacts(), {}))
    processes = 4
    pids = []
    for number in range(processes):
        pid = os.fork()
        if pid == 0:
            try:
                first, every = (1, 1) if same_steps else (1 + number, processes)
                _commit_many(tmp_path, range(first, 1 + 50 * every, every))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * processes
    found = checkpoint.steps(tmp_path)
    assert found[-1] == (50 if same_steps else 200)
    assert names(tmp_path) == sorted(
        [MANIFEST, *(checkpoint.step_folder(tmp_path, step).name for step in found)]
    ), "something was left behind"


# ---- failures ----


def test_a_full_disk_leaves_everything_as_it_was(tmp_path: Path) -> None:
    model, optimizer = save_small(tmp_path / "a")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (10, 1000, 4000):  # in the header, in a tensor, in the manifest
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"rank 0: .*File too large") as caught:
                checkpoint.save(tmp_path / "b", model, optimizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(tmp_path) in str(caught.value)
        assert names(tmp_path) == ["a"], "what was written is deleted, to make room"
    verify(tmp_path / "a")


def _save_with_a_failing_rank(rank: int, world_size: int, folder: Path) -> list[str]:
    """Save twice; then let one rank fail at each place; then save again."""
    model, optimizer = filled(Setup("mlp", (world_size,)))
    checkpoint.save(folder / "first", model, optimizer)
    told = []

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard")

    places: list[tuple[Any, str, int]] = [
        (storage.Writer, "prepare_local_plan", 1),
        (storage, "Commit", 0),
        (storage, "write_shard", world_size - 1),
        (safetensors.os, "fsync", 0),
        (manifests, "write_manifest", 0),
        (commit.Commit, "publish", 0),
    ]
    for place, name, failing in places:
        original = getattr(place, name)
        if rank == failing:
            setattr(place, name, fail)
        try:
            checkpoint.save(folder / "second", model, optimizer)
            told.append("nothing")
        except CheckpointError as error:
            told.append(f"{failing} {error}")
        finally:
            setattr(place, name, original)
        if rank == 0:
            assert names(folder) == ["first"], name
    checkpoint.save(folder / "second", model, optimizer)
    return told


def test_a_rank_that_fails_is_named_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(_save_with_a_failing_rank, 3, tmp_path)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert len(by_rank[0]) == 6
    for told in by_rank[0]:
        failing, _, message = told.partition(" ")
        assert message.startswith(f"saving {tmp_path}/second: rank {failing}: ")
        assert message.endswith(": No space left on device")
    verify(tmp_path / "first")
    verify(tmp_path / "second")


def _save_while_a_rank_dies(
    rank: int, world_size: int, folder: Path, dying: int
) -> tuple[str, PeerLostError | None]:
    model, optimizer = build(Setup("mlp", (world_size,)), seed=0)
    checkpoint.save(folder / "first", model, optimizer)
    if rank == dying:
        storage.write_shard = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoint.save(folder / "second", model, optimizer)
    except CheckpointError as error:
        time.sleep(0.5)  # or its end could be taken for another loss
        return str(error), lost_peer_behind(error)
    return "nothing", None


@pytest.mark.parametrize("dying", [0, 2])
def test_a_rank_that_dies_is_named_by_all_that_are_left(
    ranks: Ranks, tmp_path: Path, dying: int
) -> None:
    outcomes = ranks(_save_while_a_rank_dies, 3, tmp_path, dying, expect_failures=True)
    for outcome in outcomes:
        if outcome.rank != dying:
            assert outcome.ok, outcome.describe(3)
            message, cause = outcome.result
            assert f"rank {dying}" in message
            assert "was lost" in message
            assert cause is not None, "no mistake of this rank, or of its user"
    assert "second" not in names(tmp_path)
    verify(tmp_path / "first")


# ---- killed at any moment ----


def _save_until_killed(
    rank: int, world_size: int, folder: Path, victims: list[int], seconds: float
) -> int:
    """Check what is there; then save until the end. The victims end at a random moment."""
    model, optimizer = build(Setup("mlp", (world_size,)), seed=rank)
    give_state(optimizer)
    if (newest := checkpoint.latest(folder)) is not None:
        checkpoint.load(newest, model, optimizer)
        assert not wrong(model, optimizer), f"{newest} is not what was saved"
    fill(model, optimizer)
    torch.distributed.barrier()
    step = max(checkpoint.steps(folder), default=0)
    if newest is None:  # on a busy machine, the end may come before a first save
        step += 1
        checkpoint.save(checkpoint.step_folder(folder, step), model, optimizer)
    if rank in victims:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        step += 1
        try:
            checkpoint.save(checkpoint.step_folder(folder, step), model, optimizer, keep_last=2)
        except CheckpointError:
            if rank in victims:  # the other victim went first
                signal.pause()
            return step


def test_ranks_killed_at_random_moments_leave_the_newest_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    draw = random.Random(0)
    for victims in ([0], [1], [0, 1]):
        outcomes = ranks(
            _save_until_killed, 2, tmp_path, victims, draw.uniform(0.05, 0.6), expect_failures=True
        )
        for outcome in outcomes:
            if outcome.rank in victims:
                assert outcome.exitcode == -signal.SIGALRM, outcome.describe(2)
            else:
                assert outcome.ok, outcome.describe(2)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        verify(newest)
    assert len(checkpoint.steps(tmp_path)) <= 3


# ---- killed at each call of the system ----

_CALLS = ("mkdir", "open", "write", "fsync", "rename", "rmdir", "unlink")


def _save_until_call(folder: Path, model: torch.nn.Module, number: int) -> None:
    """Save the second checkpoint in place of the first, and end at a call of the system."""
    left = number

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def end_or_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(1)
            return call(*args, **kwargs)

        return end_or_call

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))
    checkpoint.save(folder / "step-00000002", model, keep_last=1)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_save_killed_at_any_call_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path / "first" / "step-00000001", first)
    for number in range(200):
        folder = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        pid = os.fork()
        if pid == 0:
            _save_until_call(folder, second, number)
        killed = os.waitpid(pid, 0)[1] != 0
        newest = checkpoint.latest(folder)
        assert newest is not None, f"nothing is left after call {number}"
        verify(newest)
        checkpoint.save(folder / "step-00000003", first, keep_last=1)
        assert names(folder) == ["step-00000003"], "leftovers are gone after the next save"
        if not killed:
            break
    assert not killed
    assert number > 15, "the calls were counted"


# ---- single files, and folders of other formats ----


def test_what_is_written_beside_its_name_gets_it_at_the_end(tmp_path: Path) -> None:
    with beside.written_beside(tmp_path / "out", None) as partial:
        assert commit.is_partial(partial)
        partial.write_text("new")
        assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path, kind: str) -> None:
    old = tmp_path / "out" / "a.json" if kind == "folder" else tmp_path / "out"
    old.parent.mkdir(exist_ok=True)
    old.write_text("old")

    def write_half() -> None:
        with beside.written_beside(tmp_path / "out", None, force=True) as partial:
            partial.write_text("half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a name

    with pytest.raises(OSError, match=r"No space left on device: .*out'"):
        write_half()
    assert names(tmp_path) == ["out"]
    assert old.read_text() == "old"


def test_a_replaced_folder_comes_back_if_the_new_one_cannot_get_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.json").write_text("old")
    rename = Path.rename

    def fail_once(path: Path, target: Path) -> Path:
        if path.name == ".out.partial":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with (
        pytest.raises(OSError, match="Input/output error"),
        beside.written_beside(tmp_path / "out", None, force=True) as partial,
    ):
        partial.mkdir()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a.json").read_text() == "old"


def _synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Sizes of files when they were synced last, by inode; filled as files are synced."""
    sizes: dict[int, int] = {}
    fsync = os.fsync

    def record(handle: int) -> None:
        status = os.fstat(handle)
        sizes[status.st_ino] = status.st_size
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return sizes


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power, a name without contents would look like a complete checkpoint."""
    synced = _synced(monkeypatch)
    path = checkpoint.save_rank_checkpoint(str(tmp_path / "lm"), make()[0])
    assert synced.get(path.stat().st_ino) == path.stat().st_size


@pytest.mark.parametrize("to", [Format.HF, Format.DCP, Format.SHARDWISE])
def test_every_file_of_a_folder_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Format
) -> None:
    save_small(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "small"}')
    synced = _synced(monkeypatch)
    convert(tmp_path / "saved", tmp_path / "out", to, max_shard_size=200)
    files = list((tmp_path / "out").iterdir())
    assert files
    for file in files:
        assert synced.get(file.stat().st_ino) == file.stat().st_size, file.name
    assert (tmp_path / "out").stat().st_ino in synced, "its names too"
