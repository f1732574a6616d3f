"""How a checkpoint comes to be there: all at once, and only when it is on the disk.

    root/.step-00000040.partial/    what is being written, locked by the process that commits
    root/step-00000040/             its name after one rename

    root/.deleted-6f1c09d2.partial/ what is being deleted, locked by the process that deletes

Whoever is killed leaves a partial folder whose lock is free; the next save deletes it. What is
complete is found by looking, not by a note that could be wrong. A symbolic link is no checkpoint
of the folder that it lies in: it is not followed, and what it points to is never deleted.

Processes may commit and delete in one folder beside each other. Names are given and taken under a
lock on the root, held for a moment: so nobody sees a partial folder that is not locked yet, or
deletes one under the name of another. No torch here.

Where something new is written: beside its name first, which it gets when it is complete.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.disk.entries import Manifest
from shardwise.checkpoint.disk.manifest import read_manifest
from shardwise.errors import CheckpointError

#: A path, as text or as an object.
StrPath = str | os.PathLike[str]

_STEP = re.compile(r"step-(\d{8,})", re.ASCII)
_PARTIAL = re.compile(r"\.(?P<name>.+)\.partial", re.ASCII | re.DOTALL)
_LOOKS = 50  # at a folder from which a run deletes what is looked at
_OURS = re.compile(r"shard-\d+-of-\d+\.safetensors|manifest\.json", re.ASCII)
_LOOK_SECONDS, _MOST_SECONDS = 0.002, 60.0  # between looks at the lock on a root; all of them


def step_folder(root: StrPath, step: int) -> Path:
    """Where the checkpoint of a step lies: ``root/step-00000040``."""
    return Path(root) / f"step-{step:08}"


def steps(root: StrPath) -> list[int]:
    """The steps of which a folder has complete checkpoints, lowest first."""
    return [step for step, path in _step_folders(Path(root)) if is_complete(path)]


def latest(root: StrPath) -> Path | None:
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


def damage(root: Path) -> tuple[Path, str] | None:
    """The folder of the highest step, and what is wrong with it, if it is not complete.

    Checkpoints get their names and lose them at once: so that is damage, or none of ours.
    """
    for step, path in reversed(_step_folders(Path(root))):
        try:
            check_complete(path)
        except CheckpointError as error:
            if os.path.lexists(path):  # else it was deleted meanwhile
                return step_folder(root, step), str(error)
        else:
            return None
    return None


def is_complete(folder: StrPath) -> bool:
    """Whether a checkpoint is whole: its manifest can be read, and its files have their sizes.

    It does not read the files: :meth:`.pieces.PieceReader.verify` does.
    """
    try:
        check_complete(folder)
    except CheckpointError:
        return False
    return True


def check_complete(folder: StrPath) -> None:
    """Check that a checkpoint is whole, as :func:`is_complete` does.

    Raises:
        CheckpointError: it is not; the message says what is missing.
    """
    check_files(Path(folder), read_manifest(Path(folder)))


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


def keep_last(root: StrPath, count: int, *, spare: StrPath | None = None) -> None:
    """Delete all but the newest complete checkpoints of a folder.

    Args:
        root: the folder.
        count: how many to keep, at least one.
        spare: one that counts as the newest, whatever its step. The one of the highest step stays
            beside it: another process may have committed that meanwhile.

    Raises:
        ValueError: the count is not positive.
        OSError: one cannot be deleted.
    """
    if count < 1:
        raise ValueError(f"keep_last: found {count}, expected 1 or more")
    folders = [step_folder(root, step) for step in steps(root)]
    highest = folders[-1:]
    newest = None if spare is None else Path(spare)
    folders.sort(key=lambda folder: folder == newest)
    for folder in folders[:-count]:
        if folder not in highest:
            delete(folder)


def delete(folder: Path) -> None:
    """Delete a checkpoint, complete or not. Cut short, it leaves none that looks complete.

    Of a symbolic link, the link is deleted, and not what it points to.

    Raises:
        OSError: it cannot be deleted.
    """
    with contextlib.ExitStack() as held:
        try:
            with _names_locked(folder.parent):
                if not folder.is_symlink():
                    held.enter_context(_locked(folder))
                doomed = _take_away(folder)
        except FileNotFoundError:  # another process has deleted it
            return
        remove(doomed)


def remove(path: Path) -> None:
    """Delete a file, a folder with all that it holds, or a symbolic link itself, if it is there.

    Where there are no locks, others may be at it too.

    Raises:
        OSError: it cannot be deleted.
    """
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return folder.with_name(f".{folder.name}.partial")


def is_partial(path: Path) -> bool:
    """Whether this is the name of a folder that is being written or deleted, or of a leftover."""
    return _PARTIAL.fullmatch(path.name) is not None


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
        folder.parent.mkdir(parents=True, exist_ok=True)
        clean(folder.parent)
        with _names_locked(folder.parent):
            if os.path.lexists(folder):
                raise CheckpointError(
                    f"{folder}: is there already, expected a new name; nothing was written"
                )
            try:
                self.partial.mkdir()
            except FileExistsError:
                raise CheckpointError(
                    f"{self.partial}: is there already, and not a leftover; is another process "
                    "saving to the same name?"
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
        with _names_locked(self.folder.parent):
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
    doomed = []
    with contextlib.ExitStack() as held:
        with _names_locked(root):
            for path in root.iterdir():
                if not is_partial(path) or path.is_symlink() or not path.is_dir():
                    continue
                free = held.enter_context(_locked(path))
                if free and _is_ours(path):
                    doomed.append(_take_away(path))
        for path in doomed:
            remove(path)


def delete_partial(folder: Path) -> None:
    """Delete what a process that has ended left of a checkpoint, for the only run that saves here.

    :func:`clean` does, where there are locks. Without them only the caller can know that nobody is
    writing; else what is left would be in the way of the same step for ever.

    Raises:
        OSError: it cannot be deleted.
    """
    partial = partial_of(folder)
    try:
        with _names_locked(folder.parent):
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(handle) is _Locked.ELSEWHERE or not _is_ours(partial):
                    return
                doomed = _take_away(partial)
            finally:
                os.close(handle)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ELOOP:  # a symbolic link, which is not ours
            return
        raise
    remove(doomed)


def _is_ours(partial: Path) -> bool:
    return all(_OURS.fullmatch(name) for name in os.listdir(partial))


def _take_away(folder: Path) -> Path:
    """Give a folder a name that is nobody's, so that its own is free at once."""
    doomed = folder.with_name(f".deleted-{secrets.token_hex(4)}.partial")
    folder.rename(doomed)
    return doomed


@contextlib.contextmanager
def _names_locked(root: Path) -> Iterator[None]:
    """Be the only process that gives or takes names in a folder, where it can be locked.

    Raises:
        CheckpointError: another process does not let go of the lock.
        OSError: the folder cannot be opened.
    """
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _MOST_SECONDS
        while _lock(handle) is _Locked.ELSEWHERE:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{root}: another process has held its lock for {_MOST_SECONDS:g} s, expected "
                    "a moment; find out which is stopped, with lsof or fuser, and end it"
                )
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(handle)


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
    return _lock(handle) is _Locked.HERE


class _Locked(enum.Enum):
    """Who holds a lock."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    NOWHERE = "nowhere"  # the file system has no locks


def _lock(handle: int) -> _Locked:
    """Try to lock an open file or folder, until it is closed or the process ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Locked.ELSEWHERE
    except OSError:
        return _Locked.NOWHERE
    return _Locked.HERE


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_MAX_NAME = 255  # bytes of a file's name, on Linux


class DestinationError(ValueError):
    """Nothing can be written there: something is in the way, or the folder it should be in."""


@contextlib.contextmanager
def written_beside(
    destination: Path, source: Path | None, *, force: bool = False
) -> Iterator[Path]:
    """A free name beside ``destination``; what is written to it gets that name at the end.

    If the block raises, what it wrote is deleted, and what was at ``destination`` is as it was.

    Args:
        destination: the file or folder that is to be.
        source: what is being read, which must not be replaced, if anything is.
        force: replace a file of that name, or a folder in which nothing but a checkpoint is.

    Raises:
        DestinationError: it is there already, or its folder is not.
        OSError: it cannot be written.
    """
    check_destination(destination, source, force=force)
    partial = partial_of(destination)
    remove(partial)
    try:
        yield partial
        if partial.is_dir():
            _sync(partial)
        old = None
        if destination.is_dir():
            old = _replaced(destination)
            remove(old)
            destination.rename(old)
        partial.rename(destination)
        _sync(destination.parent)
        if old is not None:
            remove(old)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(partial)
        raise


def _replaced(destination: Path) -> Path:
    """Where what was there lies for a moment."""
    return destination.with_name(f".{destination.name}.replaced")


def check_destination(destination: Path, source: Path | None, *, force: bool = False) -> None:
    """Check that something can be written there, before anything is read.

    Raises:
        DestinationError: it cannot.
    """
    if not destination.name:
        raise DestinationError(f"found {destination}, expected the name of a file or folder")
    excess = len(os.fsencode(_replaced(destination).name)) - _MAX_NAME
    if excess > 0:
        raise DestinationError(
            f"found a name of {len(os.fsencode(destination.name))} bytes for what is made, "
            f"expected {excess} fewer"
        )
    if not destination.parent.is_dir():
        raise DestinationError(f"found no folder {destination.parent}; make it first")
    if not os.path.lexists(destination):
        return
    if not force:
        raise DestinationError(f"{destination} exists; give another name, or --force to replace it")
    if source is not None and source.resolve().is_relative_to(destination.resolve()):
        raise DestinationError(f"{destination} is, or holds, what is read; give another name")
    if destination.is_dir() and not destination.is_symlink():
        strange = next((p for p in destination.iterdir() if not _belongs(p)), None)
        if strange is not None:
            raise DestinationError(
                f"{destination} holds {strange.name}, which is no part of a checkpoint; nothing "
                "was replaced"
            )
    elif not destination.is_file() or destination.is_symlink():
        raise DestinationError(f"{destination} is no plain file; nothing was replaced")


def _belongs(path: Path) -> bool:
    """Whether a file is one that checkpoints consist of, of any format."""
    return path.is_file() and (
        path.suffix in (".safetensors", ".distcp", ".json")
        or path.name in (".metadata", "README.md", "tokenizer.model", "merges.txt", "vocab.txt")
    )


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
