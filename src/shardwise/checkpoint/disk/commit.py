"""Commit: how a checkpoint gets its name, all at once, and only when it is on the disk.

    root/.step-00000040.partial/    being written; locked by the process that commits it
    root/step-00000040/             complete; it got its name by one rename

    root/.deleted-6f1c09d2.partial/ being deleted; locked by the process that deletes it

A killed process leaves a partial folder whose lock is free, and the next save deletes it. Whether a
checkpoint is complete is found out by looking at it, not by a note that could be wrong. A symbolic
link does not count as a checkpoint of the folder that it is in: it is not followed, and what it
points to is never deleted.

Several processes may commit and delete in one folder. They take and give up names under a lock on
the root, which is held for a moment. So no one sees a partial folder before it is locked, or
deletes one under the name of another. Torch is not imported.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, overload

from shardwise.base.arguments import check_arguments
from shardwise.base.errors import CheckpointError, StoreError
from shardwise.base.files import LockHandle, sync
from shardwise.checkpoint.disk.entries import MANIFEST, Manifest, shard_name
from shardwise.checkpoint.disk.place import Place, StrPath, absolute, place_of

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
#: The name of a folder that is being deleted.
DELETED = ".deleted-{}.partial"
_PARTIAL = re.compile(r"\.(?P<name>.+)\.partial", re.ASCII | re.DOTALL)
_OURS = re.compile(r"shard-\d+-of-\d+\.safetensors|manifest\.json", re.ASCII)
_LOOKS = 50  # attempts at a folder from which a run deletes what is being looked at
_LOOK_SECONDS = 0.002  # between attempts to lock a root
_MOST_SECONDS = 60.0  # for all of these attempts


@overload
def step_folder(root: Path, step: int) -> Path: ...
@overload
def step_folder(root: StrPath, step: int) -> Any: ...  # text may be a folder or a URL
def step_folder(root: StrPath, step: int) -> Place:
    """The path of the checkpoint of a step: ``root/step-00000040``.

    Args:
        root: the folder that holds the checkpoints of a run, or its URL in an object store.
        step: the number of the step.

    Returns:
        The path; nothing is created.
    """
    check_arguments(step_folder, locals())
    return place_of(root) / f"step-{step:08}"


def steps(root: StrPath) -> list[int]:
    """The steps whose checkpoints in a folder are complete, in ascending order.

    Args:
        root: the folder that holds the checkpoints of a run; it need not exist.

    Returns:
        The numbers of the steps.

    Raises:
        StoreError: the object store does not answer.
    """
    check_arguments(steps, locals())
    return [step for step, path in _step_folders(place_of(root)) if is_complete(path)]


@overload
def latest(root: Path) -> Path | None: ...
@overload
def latest(root: StrPath) -> Any: ...  # text may be a folder or a URL
def latest(root: StrPath) -> Place | None:
    """The complete checkpoint of the highest step in a folder, or ``None`` if there is none.

    Args:
        root: the folder that holds the checkpoints of a run; it need not exist.

    Returns:
        The folder of the checkpoint, or ``None``.

    Raises:
        StoreError: the object store does not answer.
    """
    check_arguments(latest, locals())
    place = place_of(root)
    for _ in range(_LOOKS):
        folders = _step_folders(place)
        for _, path in reversed(folders):
            if is_complete(path):
                return path
        if _step_folders(place) == folders:
            break
        # A run deleted the checkpoint just looked at, after it had saved a newer one.
    return None


def damage(root: Place) -> tuple[Place, str] | None:
    """The checkpoint of the highest step in a folder and what is wrong with it.

    A checkpoint gets its name and loses it in one operation. So an incomplete one was damaged, or
    was not written by Shardwise. In a store, one without a manifest was never there.

    Returns:
        Its path, and the reason why it is not complete; ``None`` if it is complete, or if there is
        none.
    """
    for step, path in reversed(_step_folders(root)):
        try:
            check_complete(path)
        except StoreError:
            raise
        except CheckpointError as error:
            if os.path.lexists(path) if isinstance(path, Path) else (path / MANIFEST).is_file():
                return step_folder(root, step), str(error)
        else:
            return None
    return None


def is_complete(folder: StrPath) -> bool:
    """Whether a checkpoint is complete: its manifest is valid, and its files have their sizes.

    The contents of the files are not read; :func:`.survey.verify` reads them.

    Args:
        folder: the folder of one checkpoint.

    Returns:
        ``False`` also if there is no such folder.

    Raises:
        StoreError: the object store does not answer.
    """
    check_arguments(is_complete, locals())
    try:
        check_complete(folder)
    except StoreError:
        raise
    except CheckpointError:
        return False
    return True


def check_complete(folder: StrPath) -> None:
    """Check that a checkpoint is complete, as :func:`is_complete` does.

    Raises:
        CheckpointError: it is not; the message says what is missing.
    """
    from shardwise.checkpoint.disk.manifest import read_manifest  # numpy, for few callers

    place = place_of(folder)
    check_files(place, read_manifest(place))


def check_files(folder: Place, manifest: Manifest) -> None:
    """Check that all files of a manifest exist and have their sizes.

    Raises:
        CheckpointError: one does not; the message names it.
    """
    for reason in lost_files(folder, manifest).values():
        raise CheckpointError(reason)


def lost_files(folder: Place, manifest: Manifest) -> dict[str, str]:
    """The files of a manifest that are missing or have other sizes, with the reason."""
    if not isinstance(folder, Path):
        return folder.lost(manifest.files)
    lost = {}
    for name, size in manifest.files.items():
        path = folder / name
        try:
            found = os.lstat(path).st_size
        except OSError as error:
            lost[name] = f"{path}: is missing ({error.strerror})"
        else:
            if found != size:
                lost[name] = f"{path}: found {found:,} bytes, expected {size:,}"
    return lost


def keep_last(
    root: StrPath,
    count: int,
    *,
    spare: StrPath | None = None,
    keep: Collection[StrPath] = (),
) -> None:
    """Delete all but the newest complete checkpoints in a folder.

    Args:
        root: the folder.
        count: number of checkpoints to keep, at least 1.
        spare: a checkpoint that counts as the newest, whatever its step. The one of the highest
            step is kept as well: another process may have committed it in the meantime.
        keep: checkpoints that are kept even if they are not among the newest: the best one, say.

    Raises:
        ValueError: ``count`` is less than 1.
        OSError: a checkpoint cannot be deleted.
        StoreError: it cannot be deleted from an object store.
    """
    check_arguments(keep_last, locals())
    if count < 1:
        raise ValueError(f"keep_last: found {count}, expected 1 or more")
    folders = [step_folder(root, step) for step in steps(root)]
    highest = folders[-1:]
    newest = None if spare is None else place_of(spare)
    named = {absolute(path) for path in keep}
    folders.sort(key=lambda folder: folder == newest)
    for folder in folders[:-count]:
        if folder not in highest and absolute(folder) not in named:
            delete(folder)


class Commit:
    """A checkpoint that is being written, by the one process that commits it.

    Args:
        folder: path of the checkpoint once it is complete.

    Attributes:
        folder: the same.
        partial: the folder that its files are written to, which exists and is locked.

    Raises:
        CheckpointError: the path exists, or another process is writing to it.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.partial = partial_of(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean(folder.parent)
        with _names_locked(folder.parent):
            if os.path.lexists(folder):
                raise CheckpointError(
                    f"{folder}: already exists, expected a new name; nothing was written"
                )
            try:
                self.partial.mkdir()
            except FileExistsError:
                raise CheckpointError(
                    f"{self.partial}: already exists, and is not a leftover; is another process "
                    "saving to the same path?"
                ) from None
            self._handle = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Closed with this object, too: Ctrl-C may come before anybody else has it.
            self._lock = LockHandle(self._handle)
            _try_lock(self._handle)

    def file(self, rank: int, world_size: int) -> Path:
        """The path of a rank's file."""
        return self.partial / shard_name(rank, world_size)

    def size(self, name: str) -> int:
        """Size of a file that was written."""
        return (self.partial / name).stat().st_size

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, and give the checkpoint its name.

        Raises:
            CheckpointError: the result would not be valid, or the path has come to exist.
            OSError: it cannot be written, or the folder cannot be renamed.
        """
        from shardwise.checkpoint.disk.manifest import read_manifest, write_manifest

        write_manifest(self.partial, manifest)
        read_manifest(self.partial)  # what cannot be read again must not get a name
        self.publish()

    def publish(self) -> None:
        """Give the checkpoint its name. All files in it must be on the disk.

        Raises:
            CheckpointError: the path has come to exist in the meantime.
            OSError: the folder cannot be renamed or synced.
        """
        os.fsync(self._handle)
        with _names_locked(self.folder.parent):
            if os.path.lexists(self.folder):
                raise CheckpointError(
                    f"{self.folder}: was made by another process in the meantime; nothing was "
                    "replaced"
                )
            self.partial.rename(self.folder)
        sync(self.folder.parent)
        self._lock.close()

    def abandon(self) -> None:
        """Delete what was written, so that a full disk has room again."""
        shutil.rmtree(self.partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock.close()


def partial_of(path: Path) -> Path:
    """The name under which a checkpoint is written before it gets its own."""
    return path.with_name(f".{path.name}.partial")


def is_partial(path: Place) -> bool:
    """Whether this is the name of something being written or deleted, or of a leftover."""
    return _PARTIAL.fullmatch(path.name) is not None


def delete(folder: Place) -> None:
    """Delete a checkpoint, complete or not. If interrupted, none that looks complete is left.

    Of a symbolic link, the link is deleted, not what it points to.

    Raises:
        OSError: it cannot be deleted.
        StoreError: it cannot be deleted from an object store.
    """
    if not isinstance(folder, Path):
        from shardwise.checkpoint.disk.store_commit import delete_stored

        delete_stored(folder)
        return
    with contextlib.ExitStack() as held:
        try:
            with _names_locked(folder.parent):
                if not folder.is_symlink():
                    with contextlib.suppress(OSError):
                        held.enter_context(_locked(folder))
                doomed = _rename_away(folder)
        except FileNotFoundError:  # another process has deleted it
            return
        remove(doomed)


def remove(path: Path) -> None:
    """Delete a file, a folder with its contents, or a symbolic link itself, if it exists.

    Where the file system has no locks, other processes may be deleting it too.

    Raises:
        OSError: it cannot be deleted.
    """
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def clean(root: Path) -> None:
    """Delete the partial checkpoints that dead processes left in a folder.

    That is every partial folder that is not locked, and that contains only files of
    checkpoints. Where the file system has no locks, nothing counts as a leftover.
    """
    _delete_leftovers(root, None, {_LockAttempt.HELD})


def delete_partial(folder: Path) -> None:
    """Delete what a process that has ended left of a checkpoint, for the only run that saves here.

    :func:`clean` does that where the file system has locks. Without locks, only the caller can know
    that is not being written; otherwise the leftover would block the same step forever.

    Args:
        folder: path of the checkpoint, not of its partial folder.

    Raises:
        OSError: it cannot be deleted.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _delete_leftovers(
            folder.parent, partial_of(folder), {_LockAttempt.HELD, _LockAttempt.UNSUPPORTED}
        )


def leftovers(root: Path) -> list[tuple[Path, str]]:
    """The partial folders in a folder that no process holds, as :func:`clean` finds them.

    Returns:
        Their paths, and why :func:`clean` leaves one alone; empty if it does not.

    Raises:
        OSError: the folder cannot be read.
    """
    with contextlib.ExitStack() as held, _names_locked(root):
        return [
            (path, _why_kept(path, lock))
            for path, lock in _locked_partials(root.iterdir(), held)
            if lock is not _LockAttempt.TAKEN
        ]


def _why_kept(partial: Path, lock: _LockAttempt) -> str:
    if lock is _LockAttempt.UNSUPPORTED:
        return "this file system has no locks; delete it if no run saves here"
    foreign = next((name for name in os.listdir(partial) if not _OURS.fullmatch(name)), None)
    return "" if foreign is None else f"contains {foreign}, which is not of a checkpoint"


def _locked_partials(
    paths: Iterable[Path], held: contextlib.ExitStack
) -> Iterator[tuple[Path, _LockAttempt]]:
    """Yield those that are partial folders, each with an attempt to hold its lock."""
    for path in paths:
        if is_partial(path) and not path.is_symlink() and path.is_dir():
            with contextlib.suppress(OSError):  # not ours to open, or just deleted
                yield path, held.enter_context(_locked(path))


def _delete_leftovers(root: Path, only: Path | None, free: Collection[_LockAttempt]) -> None:
    """Delete partial folders, all of ``root`` or one, whose locks are in one of these states."""
    doomed = []
    with contextlib.ExitStack() as held:
        with _names_locked(root):
            paths = root.iterdir() if only is None else [only]
            for path, lock in _locked_partials(paths, held):
                # A process that deletes a checkpoint just published cannot lock it: its publisher
                # may still hold the lock. So the folder can disappear here at any time.
                with contextlib.suppress(FileNotFoundError):
                    if lock in free and _is_ours(path):
                        doomed.append(_rename_away(path))
        for path in doomed:
            remove(path)


def _is_ours(partial: Path) -> bool:
    return not _why_kept(partial, _LockAttempt.HELD)


def _rename_away(folder: Path) -> Path:
    """Rename a folder that is to be deleted, so that its name is free at once."""
    doomed = folder.with_name(DELETED.format(secrets.token_hex(4)))
    folder.rename(doomed)
    return doomed


def _step_folders(root: Place) -> list[tuple[int, Place]]:
    try:
        found = [(_STEP.fullmatch(path.name), path) for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]), path) for match, path in found if match and not path.is_symlink())


@contextlib.contextmanager
def _names_locked(root: Path) -> Iterator[None]:
    """Be the only process that gives or takes names in a folder, where it can be locked.

    Raises:
        CheckpointError: another process does not release the lock.
        OSError: the folder cannot be opened.
    """
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with LockHandle(handle):  # which ends also where Ctrl-C comes before the end of this block
        deadline = time.monotonic() + _MOST_SECONDS
        while _try_lock(handle) is _LockAttempt.TAKEN:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{root}: another process has held its lock for {_MOST_SECONDS:g} s, expected "
                    "a moment; find a process that is stopped, with lsof or fuser, and end it"
                )
            time.sleep(_LOOK_SECONDS)
        yield


class _LockAttempt(enum.Enum):
    """The result of an attempt to lock a folder."""

    HELD = "held"
    TAKEN = "taken"  # by another process
    UNSUPPORTED = "unsupported"  # by the file system


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[_LockAttempt]:
    """Hold the lock of a folder, unless another process does.

    Raises:
        OSError: the folder cannot be opened, or is a symbolic link.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with LockHandle(handle):
        yield _try_lock(handle)


def _try_lock(handle: int) -> _LockAttempt:
    """Try to lock an open folder. The lock lasts until it is closed or the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _LockAttempt.TAKEN
    except OSError:
        return _LockAttempt.UNSUPPORTED
    return _LockAttempt.HELD
