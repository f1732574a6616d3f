"""What is told of checkpoints while a run saves and deletes them, and of links among them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError
from shardwise.checkpoint.disk import commit, manifest
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.checkpoint.formats.detect import format_of
from shardwise.checkpoint.tools import survey
from tests.checkpoint.small import SHARD, save_small


def shown(folder: Path) -> list[tuple[str, str]]:
    return [(each.path.name, each.problem) for each in survey.list_checkpoints(folder)]


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save_small(checkpoint.step_folder(folder, step))


def before_manifests(
    monkeypatch: pytest.MonkeyPatch, module: object, act: Callable[[Path], None]
) -> None:
    """Let another process act right before a manifest is read."""

    def acted(folder: Path) -> object:
        act(folder)
        return read_manifest(folder)

    monkeypatch.setattr(module, "read_manifest", acted)


# ---- beside a run ----


def test_a_step_that_is_deleted_while_it_is_looked_at_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)

    def prune(folder: Path) -> None:
        if folder.name == "step-00000001":
            commit.delete(folder)

    before_manifests(monkeypatch, survey, prune)
    assert shown(tmp_path) == [("step-00000002", "")]


def test_a_folder_whose_files_go_one_by_one_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)
    doomed = commit.partial_of(tmp_path / "step-00000001")
    (tmp_path / "step-00000001").rename(doomed)
    is_file = Path.is_file

    def vanishing(path: Path) -> bool:
        found = is_file(path)
        if path == doomed / SHARD:
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", vanishing)
    told = shown(tmp_path)
    assert [name for name, _ in told] == [doomed.name, "step-00000002"]
    assert "is being written or deleted" in told[0][1]


def test_a_step_that_gets_its_name_while_it_is_looked_at_is_listed_once_and_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1, 2)
    partial = commit.partial_of(tmp_path / "step-00000002")
    (tmp_path / "step-00000002").rename(partial)

    def publish(path: Path) -> object:
        if path == partial and partial.exists():
            partial.rename(tmp_path / "step-00000002")
        return format_of(path)

    monkeypatch.setattr(survey, "format_of", publish)
    assert shown(tmp_path) == [("step-00000001", ""), ("step-00000002", "")]


def test_a_run_that_keeps_one_step_always_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only step is replaced by the next one whenever it is looked at, for a while."""
    for module, newest in ((survey, lambda: shown(tmp_path)), (manifest, _latest(tmp_path))):
        save_steps(tmp_path, 1)
        step = 1

        def save_and_prune(folder: Path) -> None:
            nonlocal step
            if step < 8:
                step += 1
                shutil.copytree(folder, tmp_path / f"step-{step:08}")
                commit.delete(folder)

        with monkeypatch.context() as patched:
            before_manifests(patched, module, save_and_prune)
            assert newest() == [("step-00000008", "")]
        shutil.rmtree(tmp_path / "step-00000008")


def _latest(folder: Path) -> Callable[[], list[tuple[str, str]]]:
    def newest() -> list[tuple[str, str]]:
        found = checkpoint.latest(folder)
        return [] if found is None else [(found.name, "")]

    return newest


def test_the_folder_of_checkpoints_may_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "checkpoints"
    save_steps(root, 1)

    def overwritten(path: Path) -> Path:
        shutil.rmtree(path)
        return path

    monkeypatch.setattr(survey, "steps_root", overwritten)
    assert shown(root) == []
    assert checkpoint.steps(root) == []


def test_a_step_that_is_deleted_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)

    def prune(folder: Path) -> object:
        manifest = read_manifest(folder)
        commit.delete(folder)
        return manifest

    monkeypatch.setattr(survey, "read_manifest", prune)
    with pytest.raises(CheckpointError, match="step-00000001: was deleted while it was read"):
        list(survey.verify(tmp_path / "step-00000001"))


# ---- links ----


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with steps 2 and 3, and links named step 1 and 9 to one that lies elsewhere."""
    folder = tmp_path / "checkpoints"
    save_steps(folder, 2, 3)
    save_small(tmp_path / "elsewhere" / "precious")
    for step in (1, 9):
        checkpoint.step_folder(folder, step).symlink_to(tmp_path / "elsewhere" / "precious")
    (folder / "newest").symlink_to(folder / "step-00000003")
    return folder


def test_a_link_is_listed_as_one_and_not_followed(linked: Path) -> None:
    (linked / "step-00000010").symlink_to("nowhere")
    followed = [each for each in survey.list_checkpoints(linked) if not each.problem]
    assert [each.step for each in followed] == [2, 3]
    links = [each for each in survey.list_checkpoints(linked) if each.problem]
    assert [each.step for each in links] == [1, 9, 10]
    assert {each.problem for each in links} == {"is a symbolic link, which is not followed"}
    assert {each.nbytes for each in links} == {0}


def test_a_link_is_no_checkpoint_of_the_folder(linked: Path) -> None:
    assert checkpoint.steps(linked) == [2, 3]
    assert checkpoint.latest(linked) == linked / "step-00000003"


def test_what_a_link_points_to_is_never_deleted(linked: Path) -> None:
    precious = sorted(os.listdir(linked.parent / "elsewhere" / "precious"))
    save_small(linked / "step-00000004", keep_last=1)
    assert sorted(path.name for path in linked.iterdir()) == [
        "newest", "step-00000001", "step-00000004", "step-00000009",
    ]  # fmt: skip
    commit.delete(linked / "step-00000001")  # it was in the way
    commit.partial_of(linked / "step-00000004").symlink_to(linked.parent / "elsewhere")
    commit.delete(linked / "step-00000004")
    assert sorted(path.name for path in linked.iterdir()) == [
        ".step-00000004.partial", "newest", "step-00000009",
    ]  # fmt: skip
    assert sorted(os.listdir(linked.parent / "elsewhere" / "precious")) == precious
