"""The folder of a job in a host's memory: whose it is, and when it goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.elastic.memory_folder import MEMORY, delete_memory, memory_folder
from shardwise.elastic.world import JOB, PARENT_PID, start_of


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of ``/dev/shm``, for a rank whose launcher is this process."""
    monkeypatch.setenv(MEMORY, str(tmp_path))
    monkeypatch.setenv(PARENT_PID, str(os.getpid()))
    monkeypatch.setenv(JOB, "job-1")
    return tmp_path


def test_ranks_of_a_job_find_the_same_folder_and_others_another(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = memory_folder()
    assert folder == memory_folder()
    assert folder.parent == memory
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(JOB, "job-2")
    assert memory_folder() != folder


def test_a_launcher_deletes_the_folder_of_its_job_alone(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = memory_folder()
    (first / "file").touch()
    monkeypatch.setenv(JOB, "job-2")
    second = memory_folder()
    delete_memory("job-1")
    assert not first.exists()
    assert second.exists()


def test_what_a_killed_launcher_left_is_deleted_by_the_next_job(memory: Path) -> None:
    processes = os.stat("/proc/self/ns/pid").st_ino
    start, mine = start_of(os.getpid()), f"shardwise-{os.geteuid()}-{processes}"
    assert start is not None
    names = {
        f"{mine}-{os.getpid()}-{start + 1}-{'a' * 16}": False,  # another process had this id
        f"{mine}-{os.getpid()}-{start}-{'b' * 16}": True,  # its launcher runs
        f"shardwise-{os.geteuid()}-{processes + 1}-1-1-{'c' * 16}": True,  # of a container
        f"shardwise-{os.geteuid() + 1}-{processes}-{os.getpid()}-1-{'d' * 16}": True,
        f"{mine}-notes": True,
    }
    for name in names:
        (memory / name).mkdir()
    memory_folder()
    assert {name: (memory / name).exists() for name in names} == names


def test_without_a_launcher_nothing_is_kept(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_PID)
    with pytest.raises(CheckpointError, match="no launcher that starts this process again"):
        memory_folder()


def test_a_folder_that_is_a_link_is_refused(memory: Path, tmp_path: Path) -> None:
    folder = memory_folder()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises((CheckpointError, FileExistsError)):
        memory_folder()


def test_a_host_without_memory_for_files_is_an_error(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY, str(memory / "none"))
    with pytest.raises(CheckpointError, match="SHARDWISE_MEMORY may name another"):
        memory_folder()
