"""Checkpoints in an object store: complete or not there, whoever writes, dies or deletes beside."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import checkpoint
from shardwise.base.errors import StoreError
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import commit, store_commit, store_path
from shardwise.checkpoint.disk.entries import MANIFEST
from shardwise.checkpoint.disk.filenames import SHARD
from shardwise.checkpoint.disk.place import place_of
from shardwise.checkpoint.disk.store_path import StorePath
from tests.checkpoint.meshes import Setup, build, filled, give_state, wrong
from tests.checkpoint.small import make, same
from tests.worlds import Ranks

pytest.importorskip("obstore", reason="needs obstore: install .[test]")

Save = Callable[..., Any]


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> StorePath:
    name = f"memory://{tmp_path}" if request.param == "memory" else f"file://{tmp_path}"
    place = place_of(f"{name}/run")
    assert isinstance(place, StorePath)
    return place


def save(path: Any, **options: Any) -> torch.nn.Module:
    model, optimizer = make()
    model.note = "saved"
    checkpoint.save(path, model, optimizer, {"step": 1, "noise": torch.ones(3)}, **options)
    return model


def names(root: StorePath) -> list[str]:
    """All that is there, without nonces."""
    return sorted(SHARD.sub(lambda m: m[0][:20], each) for each in root.below())


def files(*steps: int) -> list[str]:
    """What complete checkpoints of a single process consist of."""
    return sorted(
        f"step-{step:08}/{name}" for step in steps for name in (MANIFEST, "shard-00000-of-00001")
    )


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Save, and be killed before the commit."""

    def save_half(path: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(store_commit.StoreCommit, "finish", _killed)
            patch.setattr(store_commit.StoreCommit, "abandon", lambda self: None)
            with pytest.raises(CheckpointError, match="killed"):
                save(path)

    return save_half


def _killed(*_: Any) -> None:
    raise RuntimeError("killed")


def test_what_is_saved_is_loaded(root: StorePath) -> None:
    model = save(root / "step-00000001")
    loaded, optimizer = make(seed=1)
    extra = checkpoint.load(str(root / "step-00000001"), loaded, optimizer)
    assert extra["step"] == 1 and torch.equal(extra["noise"], torch.ones(3))
    assert same(model, loaded) and loaded.note == "saved"
    weights, _ = make(seed=2)
    checkpoint.load_weights(str(root), weights)  # the newest
    assert same(model, weights)
    assert names(root) == files(1)


def test_a_copy_in_a_folder_is_a_checkpoint(tmp_path: Path) -> None:
    root = place_of(f"file://{tmp_path}/run")
    model = save(root / "step-00000001")
    loaded, optimizer = make(seed=1)
    checkpoint.load(tmp_path / "run" / "step-00000001", loaded, optimizer)
    assert same(model, loaded)
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "step-00000001"


def test_old_ones_are_deleted_but_for_those_to_keep(root: StorePath) -> None:
    for step in range(1, 6):
        save(root / f"step-{step:08}", keep_last=2, keep=[str(root / "step-00000002")])
    assert checkpoint.steps(root) == [2, 4, 5]
    assert checkpoint.latest(str(root)) == root / "step-00000005"
    checkpoint.keep_last(root, 1)
    assert names(root) == files(5)


def test_nothing_is_replaced(root: StorePath) -> None:
    save(root / "a")
    before = root.below()
    with pytest.raises(CheckpointError, match=r"a: already exists, .* nothing was written"):
        save(root / "a")
    assert root.below() == before


def test_of_two_writers_of_one_name_one_wins_and_the_other_is_told(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = StorePath.create

    def be_late(self: StorePath, data: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        save(root / "a")  # the other one
        return create(self, data)

    monkeypatch.setattr(StorePath, "create", be_late)
    with pytest.raises(CheckpointError, match="a: was made by another process in the meantime"):
        save(root / "a")
    assert checkpoint.is_complete(root / "a")
    assert len(root.below()) == 2  # nothing is left of the one who lost


def test_a_commit_whose_answer_is_lost_counts(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = StorePath.create

    def lose(self: StorePath, data: bytes) -> bool:
        create(self, data)
        raise StoreError("the connection was reset")

    monkeypatch.setattr(StorePath, "create", lose)
    save(root / "a")
    assert checkpoint.is_complete(root / "a")
    # A client that asks again hears that there is one: its own.
    monkeypatch.setattr(StorePath, "create", lambda self, data: create(self, data) and False)
    save(root / "b")
    assert checkpoint.is_complete(root / "b")


def test_where_nobody_knows_whether_it_was_committed_nothing_is_torn(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, read = StorePath.create, StorePath.read_small
    down = False

    def lose(self: StorePath, data: bytes) -> bool:
        nonlocal down
        create(self, data)
        down = True
        raise StoreError("the network is down")

    def read_small(self: StorePath, most: int) -> bytes:
        if down:
            raise StoreError("the network is down")
        return read(self, most)

    monkeypatch.setattr(StorePath, "create", lose)
    monkeypatch.setattr(StorePath, "read_small", read_small)
    with pytest.raises(CheckpointError, match="the network is down"):
        save(root / "a")
    down = False
    assert checkpoint.is_complete(root / "a")
    down = True
    with pytest.raises(StoreError):  # it is not said that there is none
        checkpoint.is_complete(root / "a")


def test_what_a_killed_save_left_is_deleted_by_the_next_once_it_is_old(
    root: StorePath, die: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    die(root / "step-00000001")
    left = names(root)
    assert len(left) == 2 and left[0].startswith(".partial/step-00000001.")
    assert checkpoint.latest(root) is None
    assert not checkpoint.is_complete(root / "step-00000001")
    save(root / "step-00000001")  # names are free, and whoever wrote may live
    assert {*left} <= {*names(root)}
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    save(root / "step-00000002")
    assert names(root) == files(1, 2)


def test_a_save_killed_after_its_commit_leaves_a_checkpoint(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "remove", lambda self, names=("",): None)
        save(root / "step-00000001")
    assert len(root.below()) == 3  # with its mark
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    save(root / "step-00000002")
    assert checkpoint.steps(root) == [1, 2]
    assert names(root) == files(1, 2)


def test_a_deletion_that_is_killed_is_ended_by_the_next_save(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "step-00000001")
    remove = StorePath.remove

    def remove_the_manifest_only(self: StorePath, names: Any = ("",)) -> None:
        if MANIFEST not in {*names}:
            raise KeyboardInterrupt
        remove(self, names)

    monkeypatch.setattr(StorePath, "remove", remove_the_manifest_only)
    with pytest.raises(KeyboardInterrupt):
        commit.delete(root / "step-00000001")
    monkeypatch.setattr(StorePath, "remove", remove)
    assert checkpoint.latest(root) is None
    assert len(root.below()) == 2
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    save(root / "step-00000002")
    assert names(root) == files(2)


def test_a_writer_whose_files_were_taken_for_leftovers_withdraws(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two hours one has gone by on its clock: what it said cannot happen has happened."""
    create = StorePath.create

    def others(self: StorePath, data: bytes) -> bool:
        monkeypatch.setattr(StorePath, "create", create)
        monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
        save(root / "step-00000002")
        return create(self, data)

    monkeypatch.setattr(StorePath, "create", others)
    with pytest.raises(
        CheckpointError, match=r"shard-.*: is missing; the checkpoint was withdrawn"
    ):
        save(root / "step-00000001")
    assert names(root) == files(2)


def test_a_save_that_takes_too_long_gives_up(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_commit, "MOST", timedelta(0))
    with pytest.raises(CheckpointError, match="expected at most 0"):
        save(root / "a")
    assert names(root) == []


def test_a_list_that_lags_hides_nothing_that_is_complete(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root / "step-00000001")
    monkeypatch.setattr(StorePath, "below", lambda self: {})
    save(root / "step-00000002")
    assert checkpoint.is_complete(root / "step-00000002")
    loaded, optimizer = make(seed=1)
    checkpoint.load(root / "step-00000002", loaded, optimizer)


def test_what_others_keep_beside_is_left_alone(
    root: StorePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_commit, "LEFT", timedelta(microseconds=1))
    kept = [
        *(".partial/a/b.6f1c09d26f1c09d2", ".partial/notes"),
        *("step-00000001/model.safetensors", "step-00000001/thesis.pdf"),
    ]
    for name in kept:
        assert place_of(f"{root}/{name}").create(b"x")
    save(root / "step-00000001")
    commit.delete(root / "step-00000001")
    assert names(root) == kept


def _save_and_load(rank: int, world_size: int, root: str) -> tuple[list[str], list[str]]:
    model, optimizer = filled(Setup("mlp", (world_size,)))
    checkpoint.save(f"{root}/a", model, optimizer)
    other, its = build(Setup("mlp", (world_size,), last_dim=True), seed=3)
    give_state(its)
    checkpoint.load(f"{root}/a", other, its)
    told = []

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "shard")

    original = store_path.StorePath.write
    if rank == world_size - 1:
        store_path.StorePath.write = fail  # type: ignore[method-assign]
    try:
        checkpoint.save(f"{root}/b", model, optimizer)
    except CheckpointError as error:
        told.append(str(error))
    finally:
        store_path.StorePath.write = original  # type: ignore[method-assign]
    return wrong(other, its), told


def test_ranks_save_and_load_and_fail_together(ranks: Ranks, tmp_path: Path) -> None:
    for bad, told in ranks(_save_and_load, 3, f"file://{tmp_path}/run"):
        assert bad == []
        assert told == [f"saving file://{tmp_path}/run/b: rank 2: shard: No space left on device"]
    assert checkpoint.is_complete(tmp_path / "run" / "a")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "a"]
