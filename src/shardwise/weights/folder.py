"""Versions of weights in a folder that several hosts see, each as ``save_pretrained`` writes it.

    FOLDER/publisher.lock           locked by the process that publishes
    FOLDER/version-00000001/        the model, and version.json
    FOLDER/version-00000002/

The newest version and the one before it stay, since somebody may be reading that. An object store
has no lock: of two that publish a version of one number, one wins. A version is there once it has
an index, which is written last.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.base import plain
from shardwise.base.boxes import full_box
from shardwise.base.errors import CheckpointError
from shardwise.base.files import Links, LockedFile, write_new
from shardwise.checkpoint.disk.commit import DELETED, delete, remove
from shardwise.checkpoint.disk.entries import dotted
from shardwise.checkpoint.disk.filenames import INDEX
from shardwise.checkpoint.disk.place import Place, absolute, read_whole
from shardwise.checkpoint.formats.hf import HfSource
from shardwise.checkpoint.ranks import hf
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.weights.version import LOOK_SECONDS, Version, quoted

_FOLDER = re.compile(r"version-(\d{8,})", re.ASCII)
_ABOUT = "version.json"
_MOST_ABOUT = 4096  # bytes
#: Seconds between two looks at an object store, each of which is two requests.
STORE_LOOK_SECONDS = 1.0
_LOOKS = 20  # attempts at a folder from which the publisher deletes what is being read


def version_folder(root: Place, number: int) -> Place:
    """The path of a version."""
    return root / f"version-{number:08}"


def _begun(root: Place) -> list[int]:
    """The numbers of all versions, in ascending order; in a store, also of incomplete ones.

    A link is not one of them.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        if isinstance(root, Path):
            with os.scandir(root) as entries:
                names = [each.name for each in entries if not each.is_symlink()]
        else:
            names = [each.name for each in root.listed()[0]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    return sorted(int(match[1]) for name in names if (match := _FOLDER.fullmatch(name)))


def _newest(root: Place) -> int | None:
    """The number of the newest complete version; ``None`` if there is none.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    numbers = reversed(_begun(root))
    return next((each for each in numbers if _stamp(version_folder(root, each)) is not None), None)


def newest_in_folder(name: str, at: str | os.PathLike[str]) -> tuple[int, Place]:
    """The newest version that is published to a folder: its number, and its path.

    Raises:
        CheckpointError: there is none, or it cannot be read.
        ValueError: ``at`` is a URL of no store, or has credentials.
    """
    root = absolute(at) / quoted(name)
    number = _newest(root)
    if number is None:
        raise CheckpointError(f"{root}: found no version, expected one; publish first")
    folder = version_folder(root, number)
    return _version_in(folder).number, folder


def _version_in(folder: Place) -> Version:
    """What a version says of itself.

    Raises:
        CheckpointError: it is damaged, or of an earlier release.
    """
    about = folder / _ABOUT
    if isinstance(folder, Path) and folder.is_dir() and not os.path.lexists(about):
        raise CheckpointError(
            f"{folder}: found no {_ABOUT}, expected a model. Before 2026-11-29, Shardwise 0.1.0 "
            "published what had changed since the version before, and nothing since reads that. "
            "Publish again, which writes the whole model, or read this folder with that release"
        )
    try:
        found = plain.read(Version, read_whole(about, _MOST_ABOUT, Links.REFUSE))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if version_folder(folder.parent, found.number) != folder:
        raise CheckpointError(f"{folder}: found version {found.number} in it")
    return found


def _stamp(folder: Place) -> object:
    """What tells a version from another one of the same path; ``None`` if it is not there."""
    if not isinstance(folder, Path):
        return (folder / INDEX).find()
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# -- writing ---------------------------------------------------------------------------------------


class FolderVersions:
    """The versions that ranks publish to a folder. Every rank makes one.

    Args:
        root: the folder, which all ranks see, or its name in an object store; made if it does not
            exist.
        saved: how the model is saved.
        ranks: who publishes.
        group: the process group of ``ranks``.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes to this folder; in a store nobody knows.
    """

    def __init__(self, root: Place, saved: hf.SavedModel, ranks: Ranks, group: Any) -> None:
        self._root = root
        self._doing = f"publishing to {root}"
        self._saved = saved
        self._ranks = ranks
        self._group = group
        self._lock: LockedFile | None = None
        self._before = 0  # number of the version that this publisher wrote last; 0: none
        self.version, self._origin = ranks.first(self._doing, self._begin)

    def _begin(self) -> tuple[int, str]:
        if isinstance(self._root, Path):
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = LockedFile(self._root / "publisher.lock", self._doing)
            _remove_left(self._root)
        return _newest(self._root) or 0, secrets.token_hex(8)

    def update(self) -> None:
        """Write the next version.

        Raises:
            CheckpointError: it could not be written, on any rank. Readers see the one before.
        """
        number = self._ranks.first(self._doing, lambda: max(_begun(self._root), default=0) + 1)

        def write_others(folder: Path) -> None:
            self._saved.write_others(folder)
            write_new(folder / _ABOUT, plain.written(Version(number, self._origin)))

        def delete_older() -> None:
            for each in _begun(self._root):
                if each < self._before:
                    _delete(version_folder(self._root, each))
            if isinstance(self._root, Path):
                _remove_left(self._root)

        saved = replace(self._saved, write_others=write_others)
        hf.write_model(version_folder(self._root, number), saved, group=self._group)
        self.version = number
        self._ranks.first(self._doing, delete_older)
        self._before = number

    def close(self) -> None:
        """Publish no more. The versions stay."""
        if self._lock is not None:
            self._lock.close()


def _delete(version: Place) -> None:
    if isinstance(version, Path):
        delete(version)
        return
    from shardwise.checkpoint.disk.store_commit import delete_stored  # of no use to folders

    delete_stored(version, version.below())


def _remove_left(root: Path) -> None:
    """Remove what is left of versions whose deletion was interrupted."""
    for path in root.glob(DELETED.format("*")):
        remove(path)


# -- reading ---------------------------------------------------------------------------------------


class FolderReader:
    """The versions of a folder, each read into memory of this process when it is asked for.

    Args:
        root: the folder, or its name in an object store; it need not exist yet.

    Attributes:
        look_seconds: seconds between two looks at whether there is a newer version.
    """

    def __init__(self, root: Place) -> None:
        self._root = root
        self.look_seconds = LOOK_SECONDS if isinstance(root, Path) else STORE_LOOK_SECONDS
        self._version: Version | None = None  # that was read last
        self._stamp: object = None

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none."""
        number = _newest(self._root)
        if number is None:
            return None
        last = self._version
        if last is not None and last.number == number and self._stamp == self._stamp_of(number):
            return last  # a new one of this number may be in a new folder
        return Version(number, "")

    def read(self) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]] | None:
        """The newest version, and its tensors by name; ``None`` if there is none.

        Raises:
            CheckpointError: it is damaged, or of an earlier release.
        """
        for look in itertools.count(1):
            if (number := _newest(self._root)) is None:
                return None
            try:
                tensors = self._read(number)
                break
            except CheckpointError:
                # The publisher may have deleted what was being read.
                if look == _LOOKS or number == _newest(self._root):
                    raise
        assert self._version is not None
        return self._version, iter(tensors.items())

    def _read(self, number: int) -> dict[str, torch.Tensor]:
        folder, stamp = version_folder(self._root, number), self._stamp_of(number)
        version = _version_in(folder)
        try:
            with HfSource(folder) as source:
                source.expect((path, full_box(info.shape)) for path, info in source.tensors.items())
                tensors = {dotted(path[1:]): source.full(path) for path in source.tensors}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._version, self._stamp = version, stamp
        return tensors

    def _stamp_of(self, number: int) -> object:
        return _stamp(version_folder(self._root, number))
