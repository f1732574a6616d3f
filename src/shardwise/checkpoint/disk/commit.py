"""How a checkpoint comes to be there: all at once, and only when it is on the disk.

    root/.step-00000040.partial/    what is being written, locked by the process that commits
    root/step-00000040/             its name after one rename

Whoever is killed leaves a partial folder whose lock is free; the next save deletes it. What is
complete is found by looking, not by a note that could be wrong. A symbolic link is no checkpoint
of the folder that it lies in: it is not followed, and what it points to is never deleted. No torch
here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.disk.entries import Manifest
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_PARTIAL = re.compile(r"\.(?P<name>.+)\.partial", re.ASCII | re.DOTALL)
_LOOKS = 50  # at a folder from which a run deletes what is looked at
_OURS = re.compile(r"shard-\d+-of-\d+\.safetensors|manifest\.json", re.ASCII)


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies: ``root/step-00000040``."""
    return Path(root) / f"step-{step:08}"


def steps(root: Path) -> list[int]:
    """The steps of which a folder has complete checkpoints, lowest first."""
    return [step for step, path in _step_folders(Path(root)) if is_complete(path)]


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the highest step in a folder, or ``None``."""
    for _ in range(_LOOKS):
        folders = _step_folders(Path(root))
        for _, path in reversed(folders):
            if is_complete(path):
                return path
        if _step_folders(Path(root)) == folders:
            break
        # A run has deleted what was looked at, and has saved a newer one before it did.
    return None


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is whole: its manifest can be read, and its files have their sizes.

    It does not read the files: :meth:`.pieces.PieceReader.verify` does.
    """
    try:
        check_complete(folder)
    except CheckpointError:
        return False
    return True


def check_complete(folder: Path) -> None:
    """Check that a checkpoint is whole, as :func:`is_complete` does.

    Raises:
        CheckpointError: it is not; the message says what is missing.
    """
    check_files(folder, read_manifest(folder))


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that all files of a manifest are there, with their sizes.

    Raises:
        CheckpointError: the message says what is missing.
    """
    for name, size in manifest.files.items():
        path = Path(folder) / name
        try:
            status = os.lstat(path)
        except OSError as error:
            raise CheckpointError(f"{path}: is missing ({error.strerror})") from None
        if status.st_size != size:
            raise CheckpointError(f"{path}: found {status.st_size:,} bytes, expected {size:,}")


def keep_last(root: Path, count: int, *, spare: Path | None = None) -> None:
    """Delete all but the newest complete checkpoints of a folder.

    Args:
        root: the folder.
        count: how many to keep, at least one.
        spare: one that counts as the newest, whatever its step.

    Raises:
        ValueError: the count is not positive.
        OSError: one cannot be deleted.
    """
    if count < 1:
        raise ValueError(f"keep_last: found {count}, expected 1 or more")
    folders = [step_folder(root, step) for step in steps(root)]
    folders.sort(key=lambda folder: folder == spare)
    for folder in folders[:-count]:
        delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint, complete or not. Cut short, it leaves none that looks complete.

    Of a symbolic link, the link is deleted, and not what it points to.

    Raises:
        OSError: it cannot be deleted.
    """
    doomed = partial_of(folder)
    with contextlib.suppress(FileNotFoundError):  # another job may be deleting it too
        remove(doomed)
        folder.rename(doomed)
        remove(doomed)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that it holds, or a symbolic link itself, if it is there.

    Raises:
        OSError: it cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


class Commit:
    """One checkpoint on its way. Made by the one process that commits.

    Args:
        folder: its name at the end.

    Raises:
        CheckpointError: there is something of that name, or another process is writing it.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.partial = partial_of(folder)
        if os.path.lexists(folder):
            raise CheckpointError(
                f"{folder}: is there already, expected a new name; nothing was written"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean(folder.parent)
        try:
            self.partial.mkdir()
        except FileExistsError:
            raise CheckpointError(
                f"{self.partial}: is there already, and not a leftover; is another process saving "
                "to the same name?"
            ) from None
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _try_lock(self._lock)

    def publish(self) -> None:
        """Give the checkpoint its name. Every file in it has to be on the disk.

        Raises:
            CheckpointError: something of that name has come up meanwhile.
            OSError: the folder cannot be renamed or synced.
        """
        os.fsync(self._lock)
        if os.path.lexists(self.folder):
            raise CheckpointError(f"{self.folder}: has come up meanwhile; nothing was replaced")
        self.partial.rename(self.folder)
        _sync_folder(self.folder.parent)
        os.close(self._lock)

    def abandon(self) -> None:
        """Delete what was written, so that a full disk has room again."""
        shutil.rmtree(self.partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def clean(root: Path) -> None:
    """Delete what dead processes left in a folder: partial checkpoints that nobody holds locked.

    Only folders in which nothing but files of checkpoints lies.
    """
    for path in root.iterdir():
        if not _PARTIAL.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with _locked(path) as free:
            if free and all(_OURS.fullmatch(name) for name in os.listdir(path)):
                shutil.rmtree(path)


def _step_folders(root: Path) -> list[tuple[int, Path]]:
    try:
        found = [(_STEP.fullmatch(path.name), path) for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), path) for match, path in found if match and not path.is_symlink())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder, if nobody else does."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it has gone meanwhile
        yield False
        return
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Lock a folder until the process closes it or ends.

    Where the file system cannot, nobody's folder counts as left behind.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
