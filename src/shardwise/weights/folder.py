"""Versions of weights in a folder that several hosts see, each as ``save_pretrained`` writes it.

    FOLDER/publisher.lock           locked by the process that publishes
    FOLDER/version-00000001/        the model, and version.json
    FOLDER/version-00000002/

The newest version and the one before it stay, since somebody may be reading that.
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
from shardwise.base.errors import CheckpointError
from shardwise.base.files import LockedFile, read_small, write_new
from shardwise.checkpoint.disk.commit import DELETED, delete, remove
from shardwise.checkpoint.disk.entries import dotted
from shardwise.checkpoint.formats.hf import HfSource
from shardwise.checkpoint.ranks import hf
from shardwise.checkpoint.ranks.agreement import Ranks
from shardwise.weights.version import Version, quoted

_FOLDER = re.compile(r"version-(\d{8,})", re.ASCII)
_ABOUT = "version.json"
_MOST_ABOUT = 4096  # bytes
_LOOKS = 20  # attempts at a folder from which the publisher deletes what is being read


def version_folder(root: Path, number: int) -> Path:
    """The path of a version."""
    return root / f"version-{number:08}"


def _numbers(root: Path) -> list[int]:
    """The numbers of all versions in a folder, in ascending order. A link is not one of them.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        with os.scandir(root) as entries:
            found = [_FOLDER.fullmatch(each.name) for each in entries if not each.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    return sorted(int(match[1]) for match in found if match)


def newest_in_folder(name: str, at: str | os.PathLike[str]) -> tuple[int, Path]:
    """The newest version that is published to a folder: its number, and its path.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    root = Path(os.path.abspath(at)) / quoted(name)
    numbers = _numbers(root)
    if not numbers:
        raise CheckpointError(f"{root}: found no version, expected one; publish first")
    folder = version_folder(root, numbers[-1])
    return _version_in(folder).number, folder


def _version_in(folder: Path) -> Version:
    """What a version says of itself.

    Raises:
        CheckpointError: it is damaged, or of an earlier release.
    """
    about = folder / _ABOUT
    if folder.is_dir() and not os.path.lexists(about):
        raise CheckpointError(
            f"{folder}: found no {_ABOUT}, expected a model. Before 2026-11-29, Shardwise 0.1.0 "
            "published what had changed since the version before, and nothing since reads that. "
            "Publish again, which writes the whole model, or read this folder with that release"
        )
    try:
        found = plain.read(Version, read_small(about, _MOST_ABOUT))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from None
    if version_folder(folder.parent, found.number) != folder:
        raise CheckpointError(f"{folder}: found version {found.number} in it")
    return found


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What tells a version from another one of the same path; ``None`` if it is not there."""
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_ino, found.st_mtime_ns
    return None


# -- writing ---------------------------------------------------------------------------------------


class FolderVersions:
    """The versions that ranks publish to a folder. Every rank makes one.

    Args:
        root: the folder, which all ranks see; made if it does not exist.
        saved: how the model is saved.
        ranks: who publishes.
        group: the process group of ``ranks``.

    Attributes:
        version: number of the newest version; 0 if there is none.

    Raises:
        CheckpointError: another process publishes to this folder.
    """

    def __init__(self, root: Path, saved: hf.SavedModel, ranks: Ranks, group: Any) -> None:
        self._root = root
        self._doing = f"publishing to {root}"
        self._saved = saved
        self._ranks = ranks
        self._group = group
        self._lock: LockedFile | None = None
        self._before = 0  # number of the version that this publisher wrote last; 0: none
        self.version, self._origin = ranks.first(self._doing, self._begin)

    def _begin(self) -> tuple[int, str]:
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = LockedFile(self._root / "publisher.lock", self._doing)
        _remove_left(self._root)
        return max(_numbers(self._root), default=0), secrets.token_hex(8)

    def update(self) -> None:
        """Write the next version.

        Raises:
            CheckpointError: it could not be written, on any rank. Readers see the one before.
        """
        number = self._ranks.first(self._doing, lambda: max(_numbers(self._root), default=0) + 1)

        def write_others(folder: Path) -> None:
            self._saved.write_others(folder)
            write_new(folder / _ABOUT, plain.written(Version(number, self._origin)))

        def delete_older() -> None:
            for each in _numbers(self._root):
                if each < self._before:
                    delete(version_folder(self._root, each))
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


def _remove_left(root: Path) -> None:
    """Remove what is left of versions whose deletion was interrupted."""
    for path in root.glob(DELETED.format("*")):
        remove(path)


# -- reading ---------------------------------------------------------------------------------------


class FolderReader:
    """The versions of a folder, each read into memory of this process when it is asked for.

    Args:
        root: the folder; it need not exist yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._version: Version | None = None  # that was read last
        self._stamp: tuple[int, int] | None = None

    def newest(self) -> Version | None:
        """The newest version; ``None`` if there is none."""
        number = max(_numbers(self._root), default=0)
        last = self._version
        if last is not None and last.number == number and self._stamp == self._stamp_of(number):
            return last  # a new one of this number may be in a new folder
        return Version(number, "") if number else None

    def read(self) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]] | None:
        """The newest version, and its tensors by name; ``None`` if there is none.

        Raises:
            CheckpointError: it is damaged, or of an earlier release.
        """
        for look in itertools.count(1):
            numbers = _numbers(self._root)
            if not numbers:
                return None
            try:
                tensors = self._read(numbers[-1])
                break
            except CheckpointError:
                # The publisher may have deleted what was being read.
                if look == _LOOKS or numbers == _numbers(self._root):
                    raise
        assert self._version is not None
        return self._version, iter(tensors.items())

    def _read(self, number: int) -> dict[str, torch.Tensor]:
        folder, stamp = version_folder(self._root, number), self._stamp_of(number)
        version = _version_in(folder)
        try:
            with HfSource(folder) as source:
                tensors = {dotted(path[1:]): source.full(path) for path in source.tensors}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: {error}") from None
        self._version, self._stamp = version, stamp
        return tensors

    def _stamp_of(self, number: int) -> tuple[int, int] | None:
        return _stamp(version_folder(self._root, number))
