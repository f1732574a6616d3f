"""Where something new is written: beside its name first, which it gets when it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.disk.commit import partial_of, remove

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
