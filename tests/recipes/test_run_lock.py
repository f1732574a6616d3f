"""Two runs never train into one folder, and a run that was killed is in nobody's way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.app.recipes.core import training
from shardwise.app.recipes.core.recipe import Task
from shardwise.app.recipes.core.rundir import RunDir, locked
from shardwise.base import devices
from shardwise.base import files as lock_files
from shardwise.elastic.rank import StopSignals
from shardwise.elastic.world import LOCKED, World
from shardwise.insight.schema.option import OptionError
from shardwise.runs.files import Lock, lock_of
from tests.recipes.small import small_config


def test_a_second_run_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    files = RunDir(tmp_path / "run")
    with locked(files):
        holder = rf"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(OptionError, match=rf"--out: found a run that is .*\({holder}\), exp"):
            locked(files).__enter__()
    with locked(files):
        pass  # the first has ended


def test_a_lock_alone_is_no_run_and_no_other_file(tmp_path: Path) -> None:
    config = small_config(tmp_path).train.output
    files = RunDir(config.out)
    with locked(files):
        files.check(config)
    files.root.joinpath(".run.json.k3x9").touch()  # killed while it wrote its very first file
    files.check(config)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    """Even if a process that it has forked, which has its descriptors, lives on."""
    files = RunDir(tmp_path)
    lives, ended = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(files):
            if os.fork() == 0:
                os.close(ended)
                os.write(tell, b"forked")
                os.read(lives, 1)  # until the test has ended
                os._exit(0)
            os.read(told, 6)
            with contextlib.suppress(OptionError), locked(files):
                os._exit(1)  # it was not held
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert files.lock.read_text().startswith(f"process {pid} on ")
    with locked(files):
        assert files.lock.read_text().startswith(f"process {os.getpid()} on ")
    for each in (lives, ended, told, tell):
        os.close(each)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock_files.fcntl, "flock", refuse)
    with locked(RunDir(tmp_path)):
        assert "run.lock cannot be locked (No locks available)" in capsys.readouterr().err


def _link(lock: Path, thesis: Path) -> None:
    lock.symlink_to(thesis)


def _hard_link(lock: Path, thesis: Path) -> None:
    lock.hardlink_to(thesis)


def _dangling_link(lock: Path, thesis: Path) -> None:
    lock.symlink_to(thesis.with_name("missing"))


def _pipe(lock: Path, thesis: Path) -> None:
    os.mkfifo(lock)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (_link, "a symbolic link"),
        (_dangling_link, "a symbolic link"),
        (_hard_link, "a file of something else"),
        (_pipe, r"no regular file \(prw.*\)"),
    ],
)
def test_what_no_run_has_made_is_refused_and_not_written_to(
    tmp_path: Path, make: Callable[[Path, Path], None], found: str
) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years")
    files = RunDir(tmp_path / "run")
    files.make()
    make(files.lock, thesis)
    with pytest.raises(OptionError, match=rf"--out: found .*run\.lock, {found}, expected the file"):
        locked(files).__enter__()
    assert thesis.read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "thesis.tex"]


def test_zeros_that_a_power_loss_left_are_in_nobodys_way(tmp_path: Path) -> None:
    files = RunDir(tmp_path)
    files.lock.write_bytes(bytes(30))
    with locked(files):
        assert files.lock.read_text().startswith(f"process {os.getpid()} on ")


def test_a_full_disk_keeps_nobody_from_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it could not be written down; it is held all the same."""

    def no_room(handle: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock_files.os, "pwrite", no_room)
    files = RunDir(tmp_path)
    with locked(files), pytest.raises(OptionError, match=r"under way in .* \(it has only begun\)"):
        locked(files).__enter__()


@pytest.mark.parametrize("launcher", ["torchrun", "our own"])
def test_rank_0_takes_the_lock_where_no_launcher_of_ours_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """A job that begins again finds the folder locked by its own launcher, and trains."""
    trained = []
    monkeypatch.setattr(training, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: None)  # for the other tests' sake
    monkeypatch.setattr(training, "place_for", lambda *_: None)
    monkeypatch.setattr(training, "build_run", lambda *_: None)
    monkeypatch.setattr(training, "begin_and_train", lambda *_: trained.append(launcher))
    if launcher == "our own":
        monkeypatch.setenv(LOCKED, "1")
    world = World(0, 2, 0, 2)
    inputs = small_config(tmp_path).check(world)

    def assemble(*_: object) -> Task:
        raise AssertionError("nothing is built")

    refused = pytest.raises(OptionError, match="a run that is under way")
    with (
        locked(inputs.config.files),
        refused if launcher == "torchrun" else contextlib.nullcontext(),
    ):
        training.train(inputs, assemble, world, StopSignals())
    training.train(inputs, assemble, World(1, 2, 1, 2), StopSignals())  # other ranks never lock
    assert trained == [launcher] * (1 if launcher == "torchrun" else 2)


def test_a_page_that_looks_at_the_lock_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunDir(tmp_path / "run")
    files.make()
    looking = os.open(files.lock, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    # Of its own: the threads of other tests sleep, too.
    looks_away = types.SimpleNamespace(sleep=lambda seconds: os.close(looking))
    monkeypatch.setattr(lock_files, "time", looks_away)
    with locked(files):
        assert lock_of(files.lock) is Lock.HELD
