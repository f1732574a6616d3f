"""Single files, and folders of other formats, that get their names at the end, all at once.

One process writes them, without locks. :mod:`.commit` does it for checkpoints of many ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from shardwise.base.files import sync
from shardwise.checkpoint.disk.commit import partial_of, remove
from shardwise.checkpoint.disk.companions import is_companion, is_small
from shardwise.checkpoint.disk.filenames import is_of_attempt
from shardwise.checkpoint.disk.place import Place

if TYPE_CHECKING:
    from shardwise.checkpoint.disk.store_path import StorePath

_MAX_NAME = 255  # bytes of a file name on Linux


class DestinationError(ValueError):
    """A path that nothing can be written to: something else is there, or its folder is missing."""


@contextlib.contextmanager
def written_beside(
    destination: Path, source: Place | None, *, force: bool = False
) -> Iterator[Path]:
    """Yield a free path beside ``destination``; what is written there is renamed at the end.

    If the block raises, what it wrote is deleted, and what was at ``destination`` is unchanged.
    Files inside a folder must be on the disk when the block ends; a single file is synced here.

    Args:
        destination: the file or folder to make.
        source: the checkpoint that is read, which must not be replaced; ``None`` if there is none.
        force: replace a file of that name, or a folder that contains nothing but a checkpoint.

    Raises:
        DestinationError: the path exists, or its folder does not.
        OSError: it cannot be written.
    """
    check_destination(destination, source, force=force)
    partial = partial_of(destination)
    remove(partial)
    try:
        yield partial
        sync(partial)
        _replace(destination, partial)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(partial)
        if isinstance(error, OSError) and error.filename is None:  # as torch raises it
            error.filename = str(destination)
        raise


def _replace(destination: Path, partial: Path) -> None:
    """Rename ``partial`` to ``destination``, and delete what was there."""
    if not destination.is_dir():  # a rename replaces a file, but no folder
        partial.rename(destination)
        sync(destination.parent)
        return
    old = _replaced(destination)
    remove(old)
    destination.rename(old)
    try:
        partial.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    sync(destination.parent)
    remove(old)


def _replaced(destination: Path) -> Path:
    """The name that a folder has between its own and being deleted."""
    return destination.with_name(f".{destination.name}.replaced")


def check_destination(destination: Path, source: Place | None, *, force: bool = False) -> None:
    """Check that a path can be written to, before anything is read.

    Args:
        destination: as for :func:`written_beside`, and so are the others.
        source: see there.
        force: see there.

    Raises:
        DestinationError: it cannot.
    """
    if not destination.name:
        raise DestinationError(f"found {destination}, expected the name of a file or folder")
    excess = len(os.fsencode(_replaced(destination).name)) - _MAX_NAME
    if excess > 0:
        raise DestinationError(
            f"found a name of {len(os.fsencode(destination.name))} bytes for the file or folder to "
            f"make, expected {excess} fewer"
        )
    if not destination.parent.is_dir():
        raise DestinationError(f"found no folder {destination.parent}; make it first")
    if not os.path.lexists(destination):
        return
    if not force:
        raise DestinationError(f"{destination} exists; give another name, or --force to replace it")
    if source is not None and contains(destination, source):
        raise DestinationError(
            f"{destination} is, or contains, the checkpoint that is read; give another name"
        )
    if destination.is_dir() and not destination.is_symlink():
        other = next((path for path in destination.iterdir() if not _belongs(path)), None)
        if other is not None:
            raise DestinationError(
                f"{destination} contains {other.name}, which is not part of a checkpoint; nothing "
                "was replaced"
            )
    elif not destination.is_file() or destination.is_symlink():
        raise DestinationError(f"{destination} is not a regular file; nothing was replaced")


def contains(folder: Place, place: Place) -> bool:
    """Whether a place is a folder, or in it, also by another name: a link, ``file://``, ``s3a``."""
    one, other = _on_host(folder), _on_host(place)
    if one is None or other is None:
        names = [re.sub("^s3a:", "s3:", f"{each}/") for each in (place, folder)]
        return one is other and names[0].startswith(names[1])
    return other.resolve().is_relative_to(one.resolve())


def _on_host(place: Place) -> Path | None:
    """The path of a place of this host, of which ``file:///...`` is another name."""
    if isinstance(place, Path):
        return place
    text = os.fspath(place)
    return Path(text.removeprefix("file://")) if text.startswith("file:") else None


def _belongs(path: Path) -> bool:
    """Whether a file has the name of a file of a checkpoint, of any format."""
    return path.is_file() and _has_name(path.name)


def _has_name(name: str) -> bool:
    return (
        name.endswith((".safetensors", ".distcp", ".json"))
        or name in (".metadata", "README.md")
        or is_companion(name)
    )


def check_name(
    destination: StorePath, source: Place | None, *, force: bool = False
) -> Collection[str]:
    """Check that a name in an object store can be written to, before anything is read.

    Args:
        destination: the name.
        source: the checkpoint that is read; ``None`` if there is none.
        force: replace an object of that name, or a folder that contains nothing but a checkpoint.

    Returns:
        The files below that are replaced; not those that another process may be writing.

    Raises:
        DestinationError: it cannot.
        StoreError: the store does not answer.
    """
    from shardwise.checkpoint.disk.store_commit import under_way  # not for folders

    if not destination.name:
        raise DestinationError(f"found {destination}, expected a name below the bucket")
    files = destination.below()
    left = {name for name in files if is_of_attempt(name) or is_small(name)}  # without a commit
    taken = left != files.keys() or destination.is_file()
    if taken and not force:
        raise DestinationError(f"{destination} exists; give another name, or --force to replace it")
    if source is not None and contains(destination, source):
        raise DestinationError(
            f"{destination} is, or contains, the checkpoint that is read; give another name"
        )
    if other := next((name for name in files if "/" in name or not _has_name(name)), None):
        raise DestinationError(
            f"{destination} contains {other}, which is not part of a checkpoint; nothing was "
            "replaced"
        )
    replaced = files.keys() if force else {*filter(is_of_attempt, files)}
    return replaced - under_way(destination)


@overload
def folders_of(checkpoint: Path) -> list[Path]: ...
@overload
def folders_of(checkpoint: StorePath) -> list[StorePath]: ...
@overload
def folders_of(checkpoint: Place) -> Sequence[Place]: ...
def folders_of(checkpoint: Place) -> Sequence[Place]:
    """The folders where files beside a checkpoint may be: its own, and that of its run.

    Args:
        checkpoint: a file or a folder. ``step-00000040`` and ``checkpoints/step-00000040`` are in
            the folder of a run.
    """
    folder = checkpoint
    if checkpoint.name.endswith(".safetensors") or (
        isinstance(checkpoint, Path) and not checkpoint.is_dir()
    ):
        folder = checkpoint.parent
    if not folder.name.startswith("step-"):
        return [folder]
    run = (folder.resolve() if isinstance(folder, Path) else folder).parent
    return [folder, run.parent if run.name == "checkpoints" else run]
